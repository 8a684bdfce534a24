"""Wrong words of command lines; nothing else is amiss."""

RUN = r"""
model.hiden_size=3 | Did you mean 'hidden_size'
modle.hidden_size=3 | Did you mean 'model'
optimizer.lr=fast | optimizer.lr: expected a number, got 'fast'
optimizer.lr=[1,2] | optimizer.lr: expected a number
optimizer.lr=nan | expected a finite number
optimizer.lr=inf | expected a finite number
optimizer.lr=-inf | optimizer.lr
optimizer.lr="nan" | expected a finite number
optimizer.lr=0 | optimizer.lr: expected a positive number
optimizer.lr=1e300 | optimizer.lr: expected at most 1,000
optimizer.eps=-1 | optimizer.eps: expected a positive number
optimizer.betas=[1,1] | optimizer.betas
optimizer.betas=[0.9] | optimizer.betas
optimizer.betas=[nan,0.9] | expected a finite number
optimizer.weight_decay=1e300 | optimizer.weight_decay: expected at most 1,000
optimizer.weight_decay=nan | expected a finite number
optimizer.name=adam | Did you mean 'adamw'
schedule.peak=inf | expected a finite number
schedule.peak=1e300 | schedule.peak: expected at most 1,000
schedule.peak=0 | schedule.peak
schedule.warmup_steps=-1 | schedule.warmup_steps
schedule.final=2 | schedule.final
schedule.name=cosin | Did you mean 'cosine'
model=nanoo | Did you mean 'nano'
model.head_dim=15 | model.head_dim: 15 is odd
model.head_dim=10000000 | model.head_dim: expected at most 65,536
model.hidden_size=1000000000 | model.hidden_size: expected at most
model.hidden_size=-1 | model.hidden_size
model.hidden_size=1.5 | model.hidden_size: expected a whole number, got 1.5
model.hidden_size=null | model.hidden_size: expected a whole number, got null
model.num_hidden_layers=100000 | model.num_hidden_layers: expected at most 2,048
model.num_hidden_layers=0 | model.num_hidden_layers
model.num_attention_heads=1000000000 | model.num_attention_heads: expected at most
model.num_attention_heads=5 model.num_key_value_heads=1 | 5 heads do not divide
model.num_key_value_heads=0 | model.num_key_value_heads
model.vocab_size=99999999999999999999 | model.vocab_size: expected at most
model.vocab_size=10 | model.vocab_size: 10 embeddings
model.initializer_range=1e300 | model.initializer_range: expected at most 1,000
model.rms_norm_eps=1e300 | model.rms_norm_eps: expected at most 1,
model.softmax.softcap=1e300 | model.softmax.softcap: expected at most 1,000,000
model.softmax.final_softcap=1e-300 | model.softmax.final_softcap: expected 0.001 or more
model.initializer_range=nan | model.initializer_range
model.softmax.softcap=None | Use null for 'not set'
model.attention_backend=sdp | Did you mean 'sdpa'
model.attention_backend=flash trainer.precision=bf16 | needs a GPU, but this run is on the CPU
model.attention_backend=flex | needs a GPU
model.qk_norm=always | model.qk_norm
model.qk_norm.when=after | model.qk_norm.when
model.qk_norm.when=after_drop | there is no drop
model.from_pretrained=None | Use null for 'not set'
model.from_pretrained="" | model.from_pretrained
model.from_pretrained=/none/such | there is no directory '/none/such'
model.from_pretrained=text.txt | 'text.txt' is a file
seed=-1 | seed: expected 0 or more
seed=1180591620717411303424 | seed: expected at most
seed=one | seed: expected a whole number, got 'one'
seed=0.5 | seed: expected a whole number, got 0.5
name=a/b | name: 'a/b' names a directory
name=../evil | name: '../evil' names a directory
name="" | name
name=[a] | name
label=[1] | label
run_dir="" | run_dir: expected a directory
run_dir=text.txt | run_dir: 'text.txt' is a file
run_dir=text.txt/below | run_dir: 'text.txt' is a file
run_dir=/proc/run | cannot be written
'run_dir=~/x y' | stands in quotes
run_dir=dangling | run_dir: 'dangling' cannot be written
run_dir=circle | run_dir: 'circle' cannot be written
run_dir=others | holds other files and no run
overwrite=maybe | overwrite
overwrite=true run_dir=others | is not marked as a run
plugins=[none.py] | there is no file 'none.py'
plugins=[text.txt] | is not a Python file
plugins=[broken.py] | failed to import
plugins=none.py | plugins
positional=rop | Did you mean 'rope'
positional.layers=[] | positional.layers: expected at least one entry
positional.layers=[rop] | unknown encoding 'rop'
positional.layers=rope | positional.layers
positional.windows=[99] | window of 99
positional.windows=[0] | positional.windows[0]: expected 1 or more
positional.windows=[] | positional.windows
+positional.heads.nope=2.0 | positional.heads.nope: expected at most 1
+positional.heads.nope=-1 | positional.heads.nope: expected 0 or more
+positional.heads.nope=nan | expected a finite number
+positional.heads.nope=0.123 | is not a whole number of them
+positional.heads.rop=0.5 | unknown encoding 'rop'
+positional.encodings.rope.bass=1 | bass
positional.encodings.rope.base=nan | expected a finite number
positional.encodings.rope.base=-5 | base
positional.encodings.rope.base=big | base
positional.encodings.rope.angle_scale=1e300 | expected at most 1,000,000.
positional=rope_id data.sequence_length=128 positional.encodings.rope_id.exponent=11 | from 0 to 10
positional=nope positional.encodings.nope.temperature=1e300 | a coefficient from 0 to 100
positional=nope positional.encodings.nope.temperature=-1 | a coefficient from 0 to 100
positional.temperature.exponent=1000 | temperature.exponent: expected at most 10
positional.temperature.coefficient=1e300 | temperature.coefficient: expected at most 100
positional.temperature.scale=0 | temperature.scale: expected 0.001 or more
+positional.encodings.rope=5 | positional.encodings.rope
positional.encodings.rope.rotary_fraction=1.5 | rotary_fraction
data=filess | Did you mean 'files'
data=files | no file is named
data=files data.files=[empty.txt] | 'empty.txt' is empty
data=files data.files=[none.txt] | there is no file 'none.txt'
data=files data.files=[text.txt] | too few different documents
data=files data.files=[others] | names no file in
data=files data.files=[none/*.txt] | names no file in
data=files data.files=[notes.doc] | there is no file 'notes.doc'
data=files data.files=[circle] | 'circle' cannot be read
data=files data.files=[broken.py] | is not in .txt
data=files 'data.files=[""]' | an empty address names no file
data.files=text.txt | data.files: expected a list in brackets, got 'text.txt'
data=files data.files=["@none"] | the list 'none' cannot be read
data=files data.files=["@empty.txt"] | the list 'empty.txt' names no file
data=files data.files=["s3://a:b@c/d"] | an address with a password
data.source=books | unknown source 'books'
data.sequence_length=-1 | data.sequence_length
data.sequence_length=1 | data.sequence_length
data.sequence_length=4294967296 | data.sequence_length
data.validation=0 | data.validation
data.validation=nan | expected a finite number
data.test=1.5 | data.test
data.test_tokens=0 | data.test_tokens
data.min_characters=-1 | data.min_characters
data.bad_rows=2 | data.bad_rows
data.packing=best | data.packing
data.restart_positions=true | needs document_mask=true
data.shuffle_group=0 | data.shuffle_group
data.num_workers=-1 | data.num_workers
data.num_workers=1000000 | data.num_workers: expected at most 1,024
data.needles.share=2 | data.needles.share
data.needles.share=nan | data.needles.share
data.needles.share=0.5 data.needles.mentions=[2,99999] | data.needles.mentions
data.needles.names=[5,2] | data.needles.names
data.needles.weight=0 | data.needles.weight
data.prepared=none | data: the prepared text in 'none' does not exist
data.prepared=others | has no manifest.json
data.prepared="" data.source=x | unknown source 'x'
+data.mixture.a=5 | data.mixture.a: expected a group of keys, got 5
+data.mixture.a.weight=0 | data.mixture.a.weight: expected a positive number
+data.mixture.a.weight=nan | data.mixture.a.weight
+data.mixture.a.wait=1 | data.mixture.a.wait: unknown key
tokenizer.path=none.json | there is no file 'none.json'
tokenizer.path=None | Use null for 'not set'
tokenizer.path=others | is a directory
tokenizer.path=text.txt | is not a tokenizer.json
tokenizer.path="" | tokenizer.path
tokenizer.vocab_size=100 | tokenizer.vocab_size
tokenizer.vocab_size=10000000000 | tokenizer.vocab_size
tokenizer.sample_megabytes=0 | tokenizer.sample_megabytes
drop.at=5000 | drop.at
drop.at=1e300 | drop.at: expected at most
drop.at=-1 | drop.at
drop.at=nan | drop.at
drop.at=half | drop.at
drop.at=0.5 drop.layers=[99] | layer 99 does not exist
drop.at=0.5 drop.layers=[] | an empty list drops nothing
drop.at=0.5 drop.effect_sequences=0 | drop.effect_sequences
drop.at=0.5 drop.effect_sequences=10000000000 | drop.effect_sequences: held-out text of
drop.at=0.5 drop.to=nopee | unknown encoding 'nopee'
trainer.max_steps=0 | trainer.max_steps
trainer.max_steps=100000000000000000000 | trainer.max_steps: expected at most
trainer.max_steps=1e3x | trainer.max_steps
trainer.max_tokens=-5 | trainer.max_tokens
trainer.max_steps=5 trainer.max_tokens=9999 | trainer.max_steps: give steps or trainer.max_tokens
model=rope_id_1b | write tokenizer.vocab_size=128256
trainer.batch_size=0 | trainer.batch_size
trainer.accelerator=cpu trainer.batch_size=1000000000000 | sequences of 64 tokens need at least
trainer.micro_batch_size=7 | does not divide
trainer.precision=fp16 | trainer.precision
trainer.accelerator=gpu | torch sees no GPU
trainer.accelerator=tpu | trainer.accelerator
trainer.threads=1000000 | trainer.threads: expected at most 1,024
trainer.threads=0 | trainer.threads
trainer.gradient_clip=nan | trainer.gradient_clip
trainer.gradient_clip=-1 | trainer.gradient_clip
trainer.z_loss=1e300 | trainer.z_loss: expected at most 1,000
trainer.z_loss=inf | trainer.z_loss
trainer.keep_best=-1 | trainer.keep_best
trainer.step_timeout=0 | trainer.step_timeout
trainer.step_timeout=nan | trainer.step_timeout
trainer.checkpoint_minutes=-1 | trainer.checkpoint_minutes
trainer.max_time=None | trainer.max_time: expected a text, got 'None'. Use null
trainer.max_steps=true | trainer.max_steps: expected a whole number, got true
model.softmax.softcap=true | model.softmax.softcap: expected a number, got true
evaluation.lengths=[1,true] | evaluation.lengths[1]: expected a number, got true
optimizer.betas=[0.9,false] | optimizer.betas[1]: expected a number, got false
trainer.max_time=soon | trainer.max_time
trainer.max_time=1:99:00 | trainer.max_time
trainer.profile_steps=[5] | trainer.profile_steps
trainer.rewind_after=0 | trainer.rewind_after
strategy=dpp | Did you mean 'ddp'
strategy.shard_size=2 | strategy.shard_size
strategy.cpu_offload=true | strategy.cpu_offload
strategy.timeouts.start=0 | strategy.timeouts.start
strategy.timeouts.start=nan | expected a finite number
logger=wandbb | Did you mean 'wandb'
monitor.lengths=[0] | monitor.lengths
monitor.lengths=[] | monitor.lengths
monitor.trials=-1 | monitor.trials
monitor.lengths_every=1 monitor.windows=100000000000 | monitor.windows: held-out text of
evaluation=extention | Did you mean 'extension'
evaluation.lengths=[] | evaluation.lengths
evaluation.lengths=[0] | evaluation.lengths[0]: expected a positive number
evaluation.lengths=[-1] | evaluation.lengths[0]: expected a positive number
evaluation.lengths=[nan] | expected a finite number
evaluation.lengths=[1e300] | evaluation.lengths[0]: expected at most
evaluation.lengths=[1e6] data.sequence_length=4096 | evaluation.lengths: expected multiples
evaluation.lengths=[0.01] | evaluation.lengths: expected multiples
evaluation.lengths=one | evaluation.lengths
evaluation.methods=[] | evaluation.methods
evaluation.methods=[none,yarnn] | unknown method 'yarnn'
evaluation.methods=[none,yarn+yarn] | does one thing twice
evaluation.methods=[yarn] | expected 'none' among them
evaluation.tasks=[] | evaluation.tasks
evaluation.tasks=[perplex] | unknown task 'perplex'
evaluation.tasks=[statements] | the training text does not carry
evaluation.tasks=[perplexity,statements] | 'statements' asks for what the training text does not
evaluation.lengths=[1,5000] | evaluation.lengths: the held-out text has
evaluation.tasks=[ruler] evaluation.ruler.tasks=[vt] | tokens for RULER's vt with this tokenizer
evaluation.tasks=[standard] | evaluation.lengths: expected at least
evaluation.windows=0 | evaluation.windows
evaluation.windows=100000000000 | evaluation.windows: held-out text of
evaluation.last=0 | evaluation.last
evaluation.last=100000 | evaluation.last: 100000 tokens are more than
evaluation.batch_tokens=0 | evaluation.batch_tokens
evaluation.temperature.grid=[nan] | expected a finite number
evaluation.temperature.grid=[1e300] | evaluation.temperature.grid
evaluation.temperature.grid=[-1] | evaluation.temperature.grid
evaluation.temperature.grid=[] | evaluation.temperature.grid
evaluation.temperature.rope_id_exponent=100 | rope_id_exponent: expected at most 10
evaluation.needles.trials=0 | evaluation.needles.trials
evaluation.needles.trials=10000000000 | evaluation.needles.trials: expected at most
evaluation.needles.depths=[2] | evaluation.needles.depths
evaluation.needles.seed=-1 | evaluation.needles.seed
evaluation.dope.heads=99 evaluation.methods=[none,dope] | evaluation.dope.heads: expected at most
evaluation.dope.heads=-1 | evaluation.dope.heads
evaluation.longrope.windows=0 | evaluation.longrope.windows
evaluation.longrope.search=needle | evaluation.longrope.search
evaluation.longrope.factors=list.json | holds no keys
evaluation.longrope.factors=none | evaluation.longrope.factors: cannot read 'none'
evaluation.ruler.squad_file=none | there is no file 'none'
evaluation.ruler.tasks=[vtt] | unknown task 'vtt'
"phases=[{steps: 5}]" | phases: expected keys with values
+phases.a.tokens=0 | phases.a.tokens: expected 1 or more
"+phases.a={steps: 5, until: {flat: 0.1}}" | phases.a.until.every: expected at most 5
+controls.a=5 | controls.a
+controls.a.seed=-1 | controls.a.seed
+controls.a.model.from_run=None | controls.a.model.from_run: expected a text, got 'None'
+controls.a.modell=1 | controls.a.modell: unknown key
+controls.a.branch=drop | controls.a.branch
"+controls={../../../evil: {seed: 1}}" | '../../../evil' names a directory
"+controls={/evil: {seed: 1}}" | '/evil' names a directory
callbacks={a:{b:1}} | callbacks.a: not set yet; a plus before its word adds it
+callbacks.a=5 | callbacks.a
+callbacks.a._target_=none.Such | there is no module 'none'
+callbacks.a._target_=os.getcwd | is no subclass of lightning.Callback
+callbacks.a._target_=5 | expected a class
+experiment=drope_dem | Did you mean 'drope_demo'
experiment=drope_demo | write +experiment=drope_demo
seed | unknown command 'seed'
seed= | seed: expected a whole number, got ''
=1 | expected key=value
seed=1,2 | --multirun
+seed=3 | seed: it has a value already; write seed=3 without the plus
+positional.encodings.rope.base=5 | write positional.encodings.rope.base=5 without the plus
model=null | model: no group is null. Choose from: drope_494m
seed=[1 | not readable as key=value
a.b.c.d=1 | unknown key
seed.x=1 | seed is a value, not a group
~sed | unknown key
hydra.run.dir=x | Hydra's own settings need --multirun
--sed=1 | unknown flag '--sed=1'
--config-dir none seed=1 | there is no directory 'none'
"""

FINISHED = r"""
evaluate | checkpoint: give checkpoint=
evaluate checkpoint= | checkpoint: give checkpoint=
evaluate checkpoint=none | neither a run directory nor a checkpoint
evaluate checkpoint=text.txt | 'text.txt' is a file
evaluate checkpoint=others | 'others' is neither a run directory
evaluate checkpoint=RUNS | neither a run directory
evaluate checkpoint=RUN evaluation=nihh | Did you mean 'niah'
evaluate checkpoint=RUN evaluation.lengths=[1000] | fewer than the longest window
evaluate checkpoint=RUN evaluation.last=1000 | evaluation.last
evaluate checkpoint=RUN compare=[none] | compare: 'none' is neither
evaluate checkpoint=RUN compare=[RUN] | is named twice
evaluate checkpoint=RUN compare=none | compare
evaluate checkpoint=RUN output=text.txt | output: 'text.txt' is a file
evaluate checkpoint=RUN output=/proc/x | output: '/proc/x' cannot be written
evaluate checkpoint=RUN output=text.txt/x | output: 'text.txt' is a file
evaluate checkpoint=RUN threads=1000000 | threads: expected at most 1,024
evaluate checkpoint=RUN text.source=x | text
evaluate checkpoint=RUN plugins=[none.py] | there is no file 'none.py'
evaluate checkpoint=RUN evaluation.weighted_rope=[] evaluation.methods=[weighted_rope] | one rule
evaluate checkpoint=RUN evaluation.methods=[drop+drop] | does one thing twice
evaluate checkpoint=RUN evaluation=multiple_choice | evaluation
evaluate checkpoint=RUN evaluation=harness evaluation.tasks=[piqa] | lm-eval is not installed
evaluate checkpoint=RUN evaluation=niah evaluation.tasks=[standard] | expected at least
analyze checkpoint=RUN | give +analysis=NAME
analyze checkpoint=RUN +analysis=sinks,drop | several values; choose one
evaluate checkpoint=RUN text.source=files | text is null; write 'text={source: files}'
analyze checkpoint=none +analysis=all | neither a run directory
analyze checkpoint=RUN +analysis=sink | Did you mean 'sinks'
analyze checkpoint=RUN +analysis=all analysis.kind=x | there is no analysis 'x'
analyze checkpoint=RUN +analysis=all analysis.length=1 | analysis.length: expected 2 or more
analyze checkpoint=RUN +analysis=all analysis.length=100000000 | the held-out text has
analyze checkpoint=RUN +analysis=all analysis.texts=1000000000 | analysis.texts
analyze checkpoint=RUN +analysis=all analysis.chosen=[[9,9]] | [9, 9] is not in
analyze checkpoint=RUN +analysis=all analysis.chosen=[[1]] | chosen[0]: expected a list of 2
analyze checkpoint=RUN +analysis=all analysis.seed=-1 | analysis.seed: expected 0 or more
analyze checkpoint=RUN +analysis=sinks compare=RUN | compare: only for
analyze checkpoint=RUN +analysis=all output=text.txt | output: 'text.txt' is a file
analyze checkpoint=RUN +analysis=all output=/proc/x | cannot be written
generate checkpoint=RUN | prompt: give prompt=
evaluate checkpoint=RUN output=None | Use null for 'not set'
generate checkpoint=none prompt=a | neither a run directory
generate checkpoint=none.gguf prompt=a | checkpoint: there is no file 'none.gguf'
generate checkpoint=RUN prompt=a max_new_tokens=0 | max_new_tokens: expected 1 or more
generate checkpoint=RUN prompt=a max_new_tokens=1000000000000 | max_new_tokens: expected at most
generate checkpoint=RUN prompt=a seed=1180591620717411303424 | seed: expected at most
generate checkpoint=RUN prompt=a seed=-1 | seed
generate checkpoint=RUN prompt=a threads=1000000 | threads: expected at most 1,024
generate checkpoint=RUN prompt=a threads=0 | threads: expected 1 or more
generate checkpoint=RUN prompt=a temperature=nan | temperature
generate checkpoint=RUN prompt=a temperature=-1 | temperature
generate checkpoint=RUN prompt=a top_p=0 | top_p
generate checkpoint=RUN prompt=a 'stop=[""]' | stop: an empty string
generate checkpoint=RUN prompt=a stop=x | stop
export checkpoint=RUN | to: give to=DIRECTORY
export checkpoint=none to=out | neither a run directory
export checkpoint=RUN to=others | is not empty
export checkpoint=RUN to=text.txt | is a file
export checkpoint=RUN to=text.txt/x | is a file
export checkpoint=RUN to=/proc/x | cannot be written
export checkpoint=RUN to=out dtype=fp8 | dtype
export checkpoint=RUN to=out tolerance=nan | expected a finite number
export checkpoint=RUN to=out tolerance=-1 | tolerance
export checkpoint=RUN to=out threads=100000 | threads: expected at most
inspect | checkpoint: give a run directory
inspect checkpoint=none | neither a run directory
inspect checkpoint=RUN step=0 | step: expected 1 or more
inspect checkpoint=RUN step=1000 | step: the run has 12 steps
inspect checkpoint=RUN samples=0 | samples
inspect checkpoint=RUN step=x | step
prepare prepare.part=3/2 | prepare.part
prepare prepare.part=x | prepare.part
prepare verify=true prepare.part=1/2 | prepare.part: verify=true reads the whole text
prepare prepare.workers=0 | prepare.workers
prepare prepare.workers=1000000 | prepare.workers: expected at most
prepare verify=2 | verify
slurm slurm.nodes=0 slurm.gpus_per_node=1 | slurm.nodes
slurm slurm.gpus_per_node=1 'slurm.job_name="a⏎#SBATCH --uid=0"' | slurm.job_name: expected one line
slurm slurm.gpus_per_node=1 'slurm.extra=["--x⏎#SBATCH --uid=0"]' | slurm.extra: expected one line
slurm slurm.gpus_per_node=1 'slurm.partition="a⏎b"' | slurm.partition: expected one line
slurm slurm.gpus_per_node=1 'slurm.mem="1⏎2"' | slurm.mem: expected one line
slurm slurm.gpus_per_node=1 slurm.extra=[x] | slurm.extra
slurm slurm.gpus_per_node=1 slurm.time=soon | slurm.time
slurm slurm.gpus_per_node=1 slurm.mem=lots | slurm.mem: expected MB
plan slurm.gpus_per_node=1 slurm.nodes=3 | strategy: 'single' uses one GPU
slurm slurm.gpus_per_node=1 slurm.signal_seconds=0 | slurm.signal_seconds
slurm slurm.gpus_per_node=1 slurm.directory=text.txt | slurm.directory: 'text.txt' is a file
slurm slurm.gpus_per_node=1 overwrite=true | overwrite
slurm slurm.gpus_per_node=8 | strategy: 'single' uses one worker
evalute | Did you mean 'evaluate'
--multirun evaluate | 'evaluate': expected key=value
"""
