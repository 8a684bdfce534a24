"""The schema of every configuration: each key once, with its type, default and meaning.

Keys that are null are not set. Rules between keys are in :mod:`trainer.runs.parsing`.
"""

from dataclasses import field
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from trainer.common.errors import UserError
from trainer.common.fields import Share, configuration, validated
from trainer.common.schedule import Schedule, schedule
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, Windows
from trainer.positional.layout import LayerChoice

Length = Annotated[int, Field(ge=2)]
"""Tokens of a sequence."""
MISSING = "???"
"""Value of a key that has to be given, as Hydra writes it."""
Name = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Name of a run, a phase or a control, and of a directory."""
Place = Annotated[str, AfterValidator(expanduser)]
"""Path on this machine, which may begin with ``~``."""
Distinct = Annotated[list[str], AfterValidator(lambda names: [*dict.fromkeys(names)])]
"""Names, each once."""
Names = Annotated[Distinct, Field(min_length=1)]
"""At least one name."""
MAIN = "main"
"""Name of the run itself among its controls."""
OF_ALL_TEXTS = {"sequence_length", "document_mask", "needles", "num_workers", "mixture"}
"""Keys of data that no text of a mixture has for itself."""
PERIOD = 10_000
"""Samples in which each text of a mixture has exactly its share."""
Window = Literal["hann", "hamming", "blackman", "rectangular"]


# ---- Text ----


@configuration
class NeedlesConfig:
    """Key-value statements mixed into training sequences, in the form that the evaluation uses."""

    share: Share = 0.0
    """Share of the training sequences that carry statements."""
    names: tuple[PositiveInt, PositiveInt] = (2, 5)
    """Least and most different names in a sequence."""
    mentions: tuple[PositiveInt, PositiveInt] = (2, 20)
    """Least and most statements in a sequence."""
    weight: PositiveFloat = 10.0
    """Weight in the loss of a value that was stated before; other tokens have 1."""
    changes: Share = 0.0
    """Share of the mentions after a name's first that state a new number, so that their order
    decides."""


@configuration
class DataConfig:
    """Text, which of it is held out, and how it becomes sequences."""

    source: str = "stdlib_docs"
    """stdlib_docs (docstrings and help topics of Python), files, hub, or a plugin's source."""
    files: list[str] = field(default_factory=list)
    """Paths, directories or globs, here or at s3://, gs://, https://; @LIST is a file with one
    address a line. docs/data.md names the formats."""
    allow_patterns: list[str] = field(default_factory=list)
    """Globs of the addresses of a list that are read; empty: all."""
    hub_name: str | None = None
    """Dataset on the Hugging Face hub."""
    hub_config: str | None = None
    """Configuration of that dataset; null: its only one."""
    hub_split: str = "train"
    """Split of that dataset."""
    revision: str | None = None
    """Commit or tag of the dataset, or a word that tells two states of another source apart."""
    text_field: str = "text"
    """Column of tables, or field of JSON objects, that holds the text."""
    validation: Share = 0.03
    """Share of the text for fitting and for the drop's effect."""
    test: Share = 0.07
    """Share of the text for reported figures."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of a source that a plugin registers."""
    prepared: Place | None = None
    """Directory that `prepare` wrote, used without its source; null: found below cache_dir."""
    weight: PositiveFloat = 1.0
    """Share of the tokens of a mixture, relative to the weights of its other texts."""
    sequence_length: Length = 64
    """Tokens of a sequence; the training length of the model."""
    mixture: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several texts by name, each with changes to the keys of a source: {name: {weight: 0.7,
    hub_name: ...}, ...}."""
    document_mask: bool = False
    """Keep attention within a document."""
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    num_workers: NonNegativeInt = 0
    """Processes that read; 0: none."""
    cache_dir: Place | None = None
    """Where prepared text lies; null: $UNROPE_CACHE or the user's cache directory."""

    @property
    def texts(self) -> dict[str, "DataConfig"]:
        """Every text by name; one alone is called ``text``. Wrong keys of a mixture's text raise a
        UserError."""
        if self.mixture and self.prepared:
            raise UserError("data.prepared: expected data.mixture.NAME.prepared of each text")
        shared = vars(self) | {"weight": 1.0}
        texts = {}
        for name, changes in self.mixture.items():
            misplaced = sorted(OF_ALL_TEXTS & changes.keys())
            if misplaced:
                raise UserError(f"data.mixture.{name}: expected {misplaced} in data, for all texts")
            values = shared | changes | {"mixture": {}}
            texts[name] = validated(DataConfig, values, f"data.mixture.{name}.")
        return texts or {"text": self}


@configuration
class TokenizerConfig:
    """The tokenizer, read from a file or trained."""

    path: str | None = None
    """A tokenizer.json or a model on the hub; null: train a byte-level BPE on the text."""
    vocab_size: Annotated[int, Field(ge=257)] = 1024
    """Entries of the tokenizer that is trained; 257 hold every byte."""


# ---- Training ----


@configuration
class ScheduleConfig:
    """Learning rate of one phase, as a multiple of the optimizer's learning rates."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine, wsd (stays, then falls over decay_fraction), constant."""
    peak: PositiveFloat = 1.0
    """Factor on the optimizer's learning rates after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0 to the peak."""
    final: Share = 0.1
    """Factor at the end, as a share of the peak."""
    decay_fraction: Share = 0.2
    """Share of the phase over which wsd falls."""

    def over(self, steps: int, start: int = 0) -> Schedule:
        """Return the factor on the learning rates by update, over ``steps`` from ``start`` on."""
        shape = {"peak": self.peak, "final": self.final, "decay_fraction": self.decay_fraction}
        factor = schedule(steps, self.name, warmup=self.warmup_steps, **shape)
        return lambda step: factor(step - start)


SAME = "same"
"""The value of ``drop.to`` that drops nothing."""


@configuration
class ChangeConfig:
    """Choice of the encodings to drop, and their replacement."""

    layers: list[int] | None = None
    """Indices of the layers to drop; null: all."""
    heads: list[int] | None = None
    """Indices of the key-value heads of these layers; null: all."""
    to: str = "nope"
    """Encoding that takes the place, named as in positional; same (with drop.at): nothing is
    dropped, but schedule and optimizer are those of a drop, as a control of one."""
    windows: Windows | None = None
    """Sliding windows of all layers from the drop on, as positional.windows; null: those before."""
    qk_norm_gain: Literal["one", "matched"] = "one"
    """Gain of a QK-norm that comes on: one, or matched (to queries and keys before it)."""

    @property
    def of_what(self) -> str:
        """Description of the choice, such as ``" of layers 0, 1"``; empty for all layers."""
        parts = []
        if self.layers is not None:
            parts.append(f"layers {', '.join(map(str, self.layers))}")
        if self.heads is not None:
            parts.append(f"heads {', '.join(map(str, self.heads))}")
        return f" of {', '.join(parts)}" if parts else ""


@configuration
class DropConfig(ChangeConfig):
    """When the encoding is dropped, what replaces it, and how training resumes."""

    at: int | Share | None = None
    """A step (0: before the first one), or a fraction of the run such as 0.85; null: never."""
    optimizer_state: Literal["keep", "reset", "reset_new"] = "reset"
    """State of the optimizer: keep, reset, or reset_new (of parameters that the drop adds)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    effect_sequences: PositiveInt = 64
    """Held-out sequences whose loss is measured before and after the drop."""

    def step(self, max_steps: int) -> int | None:
        """Return the number of steps trained before the drop, or None for never."""
        if isinstance(self.at, float):
            return round(self.at * max_steps)
        return self.at


@configuration
class OptimizerConfig:
    """Optimizer and its rates; each optimizer reads the keys that it has."""

    name: str = "adamw"
    """adamw, muon (for the matrices of the blocks, AdamW for the rest), or a plugin's optimizer."""
    lr: PositiveFloat = 3e-4
    """Learning rate of AdamW, times the schedule."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices; norms and biases have none."""
    decay_embeddings: bool = False
    """Also decay embeddings and the head."""
    muon_lr: PositiveFloat = 0.02
    """Learning rate of Muon, times the schedule."""
    arguments: dict[str, Any] | None = None
    """Other settings of an optimizer that a plugin registers; null: none."""


@configuration
class TrainerConfig:
    """Length, batch, precision, logging and checkpoint intervals of a run."""

    max_steps: PositiveInt = 1000
    """Optimizer steps of the run."""
    batch_size: PositiveInt = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per forward pass of one rank; null: all that the rank has."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 (over float32 weights), fp32 (TF32 on a GPU), auto (bf16 on a GPU that has it)."""
    deterministic: bool = False
    """Compute the same bits every time, with slower GPU kernels."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device: auto (GPUs where torch sees them, otherwise the CPU), cpu, gpu."""
    threads: PositiveInt | None = None
    """CPU threads; null: OMP_NUM_THREADS or all cores, of several ranks a share of the cores."""
    gradient_clip: NonNegativeFloat = 1.0
    """Largest norm of a gradient; 0: no clipping."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model with torch.compile; auto: on a GPU."""
    log_every: PositiveInt = 10
    """Steps between logged rows."""
    checkpoint_every: PositiveInt = 1000
    """Steps between checkpoints."""
    checkpoint_minutes: PositiveFloat | None = 30.0
    """Minutes after a checkpoint until the next; null: by steps only."""
    keep_checkpoints: PositiveInt = 2
    """Number of most recent checkpoints to keep; the one before the drop is always kept."""
    keep_every: PositiveInt | None = None
    """Steps between checkpoints that are all kept; null: none."""
    max_time: Annotated[str, Field(pattern=r"^\d+:[0-5]\d:[0-5]\d$")] | None = None
    """Time as hours:minutes:seconds after which the run stops with a checkpoint; null: never."""


@configuration
class StrategyConfig:
    """Distribution of a run over devices."""

    name: Literal["single", "ddp", "fsdp2", "hsdp"] = "single"
    """single (one device), ddp (a copy on every rank), fsdp2 (sharded over all ranks), hsdp
    (sharded in groups of ranks, copied between them)."""
    shard_size: PositiveInt | None = None
    """Ranks that share one copy of the parameters, for hsdp; null: those of a node."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward recomputes: none, selective (all but products and attention), full (blocks)."""


@configuration
class LoggerConfig:
    """Destinations of metrics besides ``metrics.csv``."""

    wandb: bool = False
    """Log to Weights & Biases."""
    offline: bool = False
    """Log to the run directory; `wandb sync` sends it later."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run directory; needs the extra tensorboard."""


@configuration
class BenchmarksConfig:
    """Tasks that the model answers in training, which they do not affect, and around the drop."""

    every: PositiveInt | None = None
    """Steps between them; null: never."""
    tasks: Distinct = field(default_factory=list)
    """Tasks on validation text, named as in evaluation.tasks."""
    lengths: list[PositiveFloat] = field(default_factory=lambda: [1.0, 2.0])
    """Lengths of these tasks, in multiples of the training length."""
    limit: PositiveInt = 200
    """Questions, trials or windows of each task and length."""


@configuration
class PlotsConfig:
    """Look of figures, which are written as PNG, SVG and PDF."""

    width: Literal["double", "single"] = "double"
    """The text of a two-column paper (6.75 inches), or one of its columns (3.3 inches)."""
    font: Literal["sans", "serif"] = "sans"
    """Font of their text, which SVG and PDF hold as text."""
    size: PositiveFloat = 8.0
    """Size of their text in points."""


# ---- Evaluation ----


@configuration
class TemperatureSettings:
    """Softmax temperature 1 + c ln s, by default fitted on validation text."""

    coefficient: NonNegativeFloat | None = None
    """c; null: fitted."""
    models: Literal["free", "all"] = "free"
    """Models it is fitted for: free (those without positions), all."""
    lengths: list[Annotated[float, Field(gt=1)]] | None = None
    """Multiples of the training length to fit at (DroPE, App. C.2: one); null: those evaluated."""
    rope_id_exponent: NonNegativeFloat = 2.0
    """Exponent of temperature_rope_id."""


@configuration
class LongRopeSettings:
    """Settings of longrope."""

    search: Literal["perplexity", "needles"] = "perplexity"
    """What is minimized: perplexity (of text, LongRoPE), needles (of answers, LongRoPE2)."""
    evaluations: PositiveInt = 64
    """Sets of factors to try at each length."""
    windows: PositiveInt = 4
    """Held-out texts to try them on."""


@configuration
class ChoiceSettings:
    """Text on which dope chooses heads, and weighted_rope pairs."""

    text: str = "validation"
    """validation, or the prompts of a task: standard, noisy, multi_key, multi_query, multi_value,
    sentence, many_shot_needle, many_shot_skip, zero_shot, or a plugin's with needles."""
    length: PositiveFloat | None = None
    """Length of a text in multiples of the training length; null: the length evaluated."""
    texts: PositiveInt = 4
    """Number of texts to read."""


@configuration
class DopeSettings:
    """Which heads lose which bands; by default the paper's best at 64k tokens (Table 1) with fewer
    heads."""

    variant: Literal["by_parts", "by_all", "by_gaussian"] = "by_all"
    """What a head loses: by_parts (bands slower than one turn in C, Eq. 33), by_all (all bands),
    by_gaussian (noise takes its place, Eq. 36 and 37)."""
    by: Literal["query", "key", "joint"] = "query"
    """Whose entropies rank heads: query, key, joint (of one Gram matrix over both)."""
    entropy: Literal["vanilla", "trunc", "norm"] = "trunc"
    """trunc (truncated effective rank, Eq. 30), vanilla (mean over the bands, Eq. 26), norm (the
    largest eigenvalue itself, App. A.2)."""
    r: PositiveInt | None = 1
    """Eigenvalues of trunc; null: all. 1: 1 over the largest one's share, where Eq. 30 is 1 for
    every head."""
    stage: Literal["pre_ntk", "post_ntk", "post_rope"] = "post_ntk"
    """State of the encoding that is ranked: pre_ntk, post_ntk, post_rope."""
    order: Literal["ascending", "descending"] = "ascending"
    """ascending (heads of low entropy first), descending."""
    heads: NonNegativeInt = 1
    """Number of heads, if so many rotate; the paper takes 5 of about a thousand."""
    removal: Literal["unrotate", "zero"] = "unrotate"
    """How bands are removed: unrotate (they stand still), zero (they leave the scores)."""
    sigma: NonNegativeFloat | None = None
    """Standard deviation of the noise; null: as in the retained heads (Sec. 4.3)."""
    seed: NonNegativeInt = 0
    """Seed of the noise."""


@configuration
class WeightedRopeSettings:
    """A rule that multiplies pairs by alpha, chosen by their entropy."""

    entropy: Literal["spectrum", "sequence"] = "sequence"
    """Entropy that chooses: spectrum (SpectrumFE), sequence (SequenceFE)."""
    side: Literal["below", "above"] = "below"
    """Side of the threshold: below, above."""
    tau: Share = 0.6
    """Threshold of the entropy."""
    alpha: Share = 0.1
    """Factor on the pairs."""


@configuration
class NeedleTaskSettings:
    """Settings of statements and of all tasks with needles."""

    trials: PositiveInt = 256
    """Trials of a cell: at each depth in tasks with one needle, at each length in the others."""
    depths: Annotated[tuple[Share, ...], Field(min_length=1)] = tuple(x / 10 for x in range(11))
    """Places of the needle: 0 the beginning of the text, 1 its end."""
    needles: PositiveInt = 4
    """Needles in tasks that state several."""
    changes: NonNegativeInt = 0
    """Statements that give the requested name an earlier number, for runs with
    data.needles.changes; the answer is the last one."""
    new_tokens: PositiveInt | None = None
    """Most tokens of an answer; null: 16 for each number, 50 for a sentence (DoPE: 50)."""
    seed: NonNegativeInt = 1
    """Seed of the trials."""


@configuration
class RulerSettings:
    """Settings of ruler."""

    tasks: Distinct = field(default_factory=list)
    """Tasks of RULER, such as niah_single_1, vt, qa_1; []: all 13."""
    trials: PositiveInt = 500
    """Prompts of a task and length."""
    squad_file: Place | None = None
    """SQuAD's dev-v2.0.json, for qa_1; null: leave it out."""
    hotpotqa_file: Place | None = None
    """HotpotQA's hotpot_dev_distractor_v1.json, for qa_2; null: leave it out."""


@configuration
class LongBenchSettings:
    """Settings of longbench."""

    directory: Place | None = None
    """Directory of TASK.jsonl; null: the archive that the hub distributes."""
    tasks: Distinct = field(default_factory=list)
    """Tasks of LongBench, such as hotpotqa; []: the 14 that RoPE-ID averages (App. A.8)."""


@configuration
class ManyShotSettings:
    """Settings of many_shot."""

    file: Place | None = None
    """A .jsonl of MATH (problem, solution, perhaps answer); needed."""
    trials: PositiveInt = 100
    """Problems of a task, length and depth."""
    new_tokens: PositiveInt = 2048
    """Most tokens of an answer; by default the paper's (App. A.2)."""


@configuration
class MultipleChoiceSettings:
    """Settings of multiple_choice."""

    directory: Place | None = None
    """Directory of TASK.jsonl.gz; null: where scripts/fetch_benchmarks.py puts them."""
    tasks: Distinct = field(
        default_factory=lambda: [
            *("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande")
        ]
    )
    """Names of these files."""


@configuration
class HarnessSettings:
    """Settings of harness."""

    tasks: Distinct = field(default_factory=list)
    """Tasks and groups of lm-eval, which gets their data from the hub."""


@configuration
class EvaluationConfig:
    """Methods, tasks and lengths; the defaults are for the evaluation at the end of a run."""

    enabled: bool = True
    """Evaluate a training run at its end."""
    training_length: Length | None = None
    """C, in tokens: the unit of lengths, and where methods begin; null: that of the model."""
    methods: Names = field(default_factory=lambda: ["none", "pi", "ntk", "yarn", "temperature"])
    """Methods, several joined by + from left to right (yarn+dope): none, crop, window, pi, ntk,
    ntk_by_parts, yarn, yarn_full_range, llama3, ntk_by_parts_turns, yarn_turns, cope, dynamic_...,
    dynamic_ntk_alpha, longrope, temperature, temperature_rope_id, dope, weighted_rope, drop."""
    dtype: Literal["fp32", "bf16"] | None = None
    """fp32 (TF32 on a GPU), bf16; null: bf16 on a GPU, fp32 on a CPU."""
    fit_windows: PositiveInt = 32
    """Windows of validation text for fits."""
    layers: LayerChoice = None
    """Layers that rescalings and temperatures change: all, or indices, [3,7]; null: the layers that
    see more than the training length."""
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    dynamic_ntk_alpha: Annotated[float, Field(ge=1)] | None = None
    """Slows a sequence of n > C tokens for s = alpha n / C - (alpha - 1), in the method of this
    name; null: the length over the training length (DoPE, App. A.2)."""
    longrope: LongRopeSettings = field(default_factory=LongRopeSettings)
    choice: ChoiceSettings = field(default_factory=ChoiceSettings)
    dope: DopeSettings = field(default_factory=DopeSettings)
    weighted_rope: Annotated[list[WeightedRopeSettings], Field(min_length=1)] = field(
        default_factory=lambda: [WeightedRopeSettings()]
    )
    """Rules of weighted_rope. The paper adds {entropy: spectrum, side: above, tau: 0.4, alpha:
    0.1}; +evaluation=weighted_rope has both."""

    lengths: Annotated[list[PositiveFloat], Field(min_length=1)] = field(
        default_factory=lambda: [1.0, 2.0, 4.0, 8.0]
    )
    """Lengths in multiples of the training length."""
    tokens: Annotated[list[Length], Field(min_length=1)] | None = None
    """Lengths in tokens, in place of lengths; null: lengths."""
    tasks: Names = field(default_factory=lambda: ["perplexity", "statements"])
    """perplexity, statements (for runs trained with data.needles), standard, noisy,
    multi_key, multi_query, multi_value, sentence, ruler, longbench, many_shot, multiple_choice,
    harness."""
    windows: PositiveInt = 96
    """Held-out windows of the task perplexity at each length. Their last C tokens count, or all
    of shorter ones."""
    limit: PositiveInt | None = None
    """Most windows, trials or questions of a task and length, for a quick look; null: all."""
    batch_tokens: PositiveInt = 16384
    """Tokens in a forward pass."""
    needles: NeedleTaskSettings = field(default_factory=NeedleTaskSettings)
    ruler: RulerSettings = field(default_factory=RulerSettings)
    longbench: LongBenchSettings = field(default_factory=LongBenchSettings)
    many_shot: ManyShotSettings = field(default_factory=ManyShotSettings)
    multiple_choice: MultipleChoiceSettings = field(default_factory=MultipleChoiceSettings)
    harness: HarnessSettings = field(default_factory=HarnessSettings)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of tasks that a plugin registers with a class of its own, by the task's name."""


# ---- A run ----


@configuration
class RescaleConfig:
    """Frequencies slowed at the start of a phase, for good."""

    method: str = "yarn"
    """pi, ntk, ntk_by_parts, yarn, llama3, yarn_full_range, ntk_by_parts_turns, yarn_turns,
    cope, or a plugin's."""
    factor: Annotated[float, Field(gt=1)] | None = None
    """How much longer sequences get; null: the phase's over the longest before."""
    base: Annotated[float, Field(gt=1)] | None = None
    """New base theta of the frequencies base^(-2i/d), in place of a method; null: see method."""
    layers: LayerChoice = None
    """all, or indices; null: the layers that see more than the longest sequences before."""


@configuration
class PhaseConfig:
    """A part of a run; what is null is as the run has it."""

    steps: PositiveInt
    """Optimizer steps of the phase."""
    sequence_length: Length | None = None
    """Tokens of a sequence; null: data.sequence_length."""
    batch_size: PositiveInt | None = None
    """Sequences per optimizer step; null: trainer.batch_size."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per forward pass of one rank; null: trainer.micro_batch_size."""
    weights: dict[str, PositiveFloat] | None = None
    """Weights of the texts of data.mixture that are read, by name; null: those of the run."""
    schedule: ScheduleConfig | None = None
    """Learning rate of the phase; null: the run's, over all phases."""
    drop: ChangeConfig | None = None
    """What is dropped at the start; null: nothing."""
    rescale: RescaleConfig | None = None
    """How frequencies are slowed at the start; null: not at all."""
    optimizer_state: Literal["keep", "reset", "reset_new"] = "keep"
    """State of the optimizer: keep, reset, or reset_new (of parameters that the drop adds)."""


@configuration
class RunConfig:
    """Everything that defines a run."""

    name: Name = "run"
    """Name of the run and its directory."""
    run_dir: Place = "runs/run"
    """Directory of the run; the same command resumes what is there."""
    seed: NonNegativeInt = 0
    """Seed of the weights and of the order of samples."""
    overwrite: bool = False
    """Start again in a directory that holds a run."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register encodings, tasks, sources, optimizers and others of your own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    positional: PositionalConfig = field(default_factory=PositionalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    drop: DropConfig = field(default_factory=DropConfig)
    phases: dict[Name, PhaseConfig] = field(default_factory=dict)
    """Parts of the run by name, in order, for more than one change (docs/drop.md);
    trainer.max_steps is then their sum."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)
    plots: PlotsConfig = field(default_factory=PlotsConfig)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Lightning callbacks of your own by name: {name: {_target_: module.Class, argument:
    value}}."""
    controls: dict[Name, dict[str, Any]] = field(default_factory=dict)
    """Other runs to train and report beside this one: {name: changes}. branch: drop, or a step,
    resumes from this run's state there."""


# ---- Analysis ----


@configuration
class ShortTime:
    """Frames of a short-time Fourier transform, as in the paper on frequency entropy."""

    window: Window = "hann"
    """Window of each frame: hann, hamming, blackman, rectangular."""
    frame: Length = 1024
    """Tokens of a frame; SpectrumFE is left out of shorter texts."""
    hop: PositiveInt | None = None
    """Tokens from one frame to the next; null: half a frame."""

    @property
    def step(self) -> int:
        """Tokens from one frame to the next."""
        return self.hop or self.frame // 2


DEFAULT_FRAMES = ShortTime()


@configuration
class AttenuationSettings:
    """Perplexity by the factor on pairs of extreme entropy (Frequency Entropy, Fig. 4)."""

    alphas: list[Share] = field(default_factory=lambda: [0.0, 0.5, 0.9])
    """Factors; []: leave it out."""
    gates: list[list[WeightedRopeSettings]] = field(
        default_factory=lambda: [
            [WeightedRopeSettings("spectrum", "below", 0.2)],
            [WeightedRopeSettings("spectrum", "above", 0.4)],
            [WeightedRopeSettings("sequence", "below", 0.6)],
        ]
    )
    """Lists of rules, written as in evaluation.weighted_rope; a gate is the pairs that any of its
    rules chooses, times each of alphas."""
    choice: Literal["page", "validation"] = "page"
    """Text whose entropies choose: page (perplexity is measured on it too), validation."""
    tokens: list[PositiveInt] | None = field(default_factory=lambda: [1024])
    """First tokens of a text whose perplexity is measured, one length after another; null: all."""


@configuration
class NeedleSettings:
    """The needle that heads of extreme matrix entropy are shown with (DoPE, Fig. 2 to 6)."""

    kind: Literal["copy", "question"] = "copy"
    """copy (of the end of the text), question (a statement, asked for at the end)."""
    depth: Share = 0.1
    """Place of the statement: 0 the beginning of the text, 1 its end."""
    by: Literal["query", "key"] = "query"
    """Whose entropies rank the heads: query, key."""
    ranked_on: Literal["text", "prompt"] = "text"
    """Text that they are ranked in: text (the page's), prompt (the one with the needle)."""


@configuration
class AnalysisConfig:
    """Which analysis, of which text."""

    kind: str = "all"
    """An analysis by name, or all that the model has the structure for."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of an analysis of your own, which kind names."""
    length: Length | None = None
    """Tokens of a text with its beginning-of-text token; null: 8 times the training length, but
    no more than 4,096 or twice it, and no more than there is text."""
    texts: PositiveInt | None = None
    """Texts read together; null: as many as make 4,096 tokens, at most 16."""
    chosen: list[tuple[NonNegativeInt, NonNegativeInt]] = field(default_factory=list)
    """Pairs [layer, query head] to show as single heads; []: chosen by the analysis."""
    pairs: list[NonNegativeInt] = field(default_factory=list)
    """Rotary pairs that offset_features shows one by one; []: all of a head, or found."""
    context_length: PositiveInt | None = None
    """Tokens C of the bounds of offset_features; null: what the model is configured for, including
    its own YaRN, Llama 3 scaling or LongRoPE (its training length without)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights: fp32, bf16."""
    frequency_entropy: ShortTime = field(default_factory=ShortTime)
    prefixes: list[PositiveInt] = field(default_factory=list)
    """First tokens whose frequency entropies are shown as well (Frequency Entropy, App. F)."""
    attenuation: AttenuationSettings = field(default_factory=AttenuationSettings)
    needle: NeedleSettings = field(default_factory=NeedleSettings)
    method: str | None = None
    """Method applied to the model's layout first, named as in evaluation.methods and needing no
    text: pi, yarn, dynamic_ntk_alpha, ...; null: none."""
    file: Place | None = None
    """Text to read as a whole in place of held-out text; null: held-out text."""


# ---- Requests ----


def _text_of(value: Any) -> Any:
    """Return the keys of data for files that are named alone, as ``a.txt`` or a list."""
    names = [value] if isinstance(value, str) else value
    return {"source": "files", "files": names} if isinstance(names, list) else value


@configuration
class ModelsRequest:
    """The common keys of evaluate and analyze."""

    checkpoint: str = MISSING
    """A run directory, a checkpoint, a published model's directory, or
    hf:DIRECTORY of a model that transformers is to compute."""
    output: Place | None = None
    """Directory of the results; null: evaluation, lengths/NAME or analysis/NAME in the run, or in
    runs/ITS_NAME for a published model."""
    text: Annotated[DataConfig | None, BeforeValidator(_text_of)] = None
    """Text whose held-out splits are read, as files (a.txt, or a list) or by keys of data, such as
    test for the share; null: the first checkpoint's own source."""
    plugins: list[str] = field(default_factory=list)
    """Python files that register tasks, methods, rescalings or analyses of your own."""
    plots: PlotsConfig = field(default_factory=PlotsConfig)
    name: Name | None = None
    """Name of the results beside others of the same model; null: the option of the group."""


@configuration
class EvaluationRequest(ModelsRequest):
    """Request of the evaluate command."""

    compare: list[str] = field(default_factory=list)
    """More models, measured on the same trials."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Methods, tasks and lengths."""


@configuration
class AnalysisRequest(ModelsRequest):
    """Request of the analyze command."""

    compare: str | None = None
    """Model before the drop, for drop (null: the run's checkpoint from just before it), or
    another model, for offset_features."""
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)


@configuration
class GenerationRequest:
    """Request of the generate command."""

    checkpoint: str = MISSING
    """A run directory, a checkpoint, or a published model."""
    prompts: list[str] = field(default_factory=list)
    """Texts to continue; bare words add one each, as does prompt=..., whatever it holds."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of a continuation."""
    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0: always the likeliest token."""
    top_p: Share = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    stop: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)
    """Strings that end a continuation and are not shown, for instance 'stop=["\\n"]'."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""


@configuration
class ExportRequest:
    """Request of the export command."""

    checkpoint: str = MISSING
    """A run directory or a checkpoint."""
    to: Place = MISSING
    """Directory to write, new or empty."""
    context: Length | None = None
    """Tokens that engines may read (``max_position_embeddings``), also beyond the training length
    after a drop; null: the longest context of training."""
    tolerance: NonNegativeFloat = 1e-4
    """How far logits may differ in float32, as a share of the largest."""
    logit_scale: PositiveFloat = 1.0
    """Factor on the attention logits of the layers that see more than the training length."""


@configuration
class PlanKeys:
    """Keys of ``plan`` beside those of a run."""

    gpus: PositiveInt = 8
    """Number of GPUs, among which the batch is divided; 1 with strategy=single."""
    mfu: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a GPU's dense peak that training reaches."""


@configuration
class RecalibrateKeys:
    """Keys of ``recalibrate`` beside those of a run."""

    checkpoint: str = MISSING
    """Model: a directory or hub id of published weights, or a run."""
    minutes: PositiveFloat = 20.0
    """Minutes until the export is written, a deadline for training and evaluation."""
    text: str | list[str] | None = None
    """Text files, directories or globs to recalibrate on, as data.files; null: another data group,
    such as data=stdlib_docs."""
    to: Place | None = None
    """Directory of the export, new or empty; null: export in the run directory."""
