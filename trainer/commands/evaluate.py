"""``python -m trainer evaluate checkpoint=PATH ...``: how far does a checkpoint reach?"""

from __future__ import annotations

from trainer.errors import UserError, did_you_mean

BENCHMARKS = ("multiple_choice", "harness")
LENGTHS = ("extension", "niah", "ruler", "longbench", "many_shot")
KINDS = ("default", *LENGTHS, *BENCHMARKS)
CHOICES = ("+evaluation=", "evaluation=")


def run(words: list[str]) -> None:
    """Evaluate ``checkpoint`` (and those in ``compare``) and write a report into ``output``."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    kind, words = split_kind(words)
    if kind in BENCHMARKS:
        from trainer.commands import benchmarks

        benchmarks.run(kind, words)
        return
    from trainer.commands import lengths

    lengths.run(kind, words)


def split_kind(words: list[str]) -> tuple[str, list[str]]:
    """The kind of evaluation that ``+evaluation=`` names, and the other words.

    Raises:
        UserError: there is no such kind.
    """
    kinds = [word.partition("=")[2] for word in words if word.startswith(CHOICES)]
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(
                f"evaluation: there is no evaluation {kind!r}.{did_you_mean(kind, KINDS)}"
            )
    return (kinds or ["default"])[-1], [word for word in words if not word.startswith(CHOICES)]


HELP = """\
python -m trainer evaluate checkpoint=PATH [compare=[PATH,...]] [evaluation.KEY=VALUE ...]

Measures needle retrieval and held-out loss at multiples of the training length, for the checkpoint
as it is and with every context extension that applies to it.

  checkpoint=  a run directory (its newest checkpoint) or a checkpoint in it
  compare=     further checkpoints of the same training length and tokenizer
  output=      where the report goes; default: evaluation/ in the run directory
  evaluation.  lengths, methods, tasks, needles.trials, dtype, ...: see conf/evaluation/default.yaml
  text.        another source of held-out text, such as 'text={source: files, files: [a.txt]}'

python -m trainer evaluate checkpoint=PATH +evaluation=extension [evaluation.KEY=VALUE ...]

Measures perplexity and retrieval at multiples of the training length for every checkpoint and every
method that costs no training, on the same trials; also for published models (a directory or .gguf).
+evaluation=niah, ruler, longbench and many_shot are the same with other tasks.

  evaluation.  lengths, methods, tasks, needles.trials, dtype, ...: see conf/extension.yaml
  text.        another source of held-out text, such as 'text={source: files, files: [a.txt]}'

python -m trainer evaluate checkpoint=PATH +evaluation=multiple_choice [evaluation.KEY=VALUE ...]

Scores ARC, HellaSwag, OpenBookQA, PIQA and WinoGrande from the files that
scripts/fetch_benchmarks.py fetches; also for a directory that Hugging Face models come in.

  evaluation.  tasks, limit, max_length, batch_tokens, add_bos, directory, unconditional: see
               conf/multiple_choice.yaml

python -m trainer evaluate checkpoint=PATH +evaluation=harness evaluation.tasks=[NAME,...]

Scores tasks of lm-eval (pip install 'unrope[eval]'), which gets their data from the hub.

  evaluation.  limit, max_length, batch_tokens, add_bos, num_fewshot, include_path: see
               conf/harness.yaml
"""
