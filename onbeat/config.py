"""Every key of a recipe: its type, its default, what it means. No torch here.

`recipe.py` reads them from TOML files and flags; `onbeat config` prints this page. What can be derived is a property,
not a key.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

_Positive = Annotated[int, Field(ge=1)]
_Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class PathMark:
    """Marks a key whose text starts with a path to be resolved against the recipe's folder."""


SourcePath = Annotated[str, PathMark()]
"""A file, a directory, or `file.py:function`."""


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunConfig(_Section):
    dir: str = "runs/latest"
    """Where everything the run writes goes; relative to the working directory."""
    rollout_groups: Annotated[int, Field(ge=0)] = 8
    """Groups per period whose prompts, completions and rewards are written to rollouts/, for people to read."""


class ModelConfig(_Section):
    path: SourcePath
    """A Hugging Face model directory, or `file.py:function`, called once with an empty directory to fill."""


class ScheduleConfig(_Section):
    mode: Literal["periodic", "sync"] = "periodic"
    """periodic: train on each group when it is ready. sync: wait for the whole period first. The same weights."""
    order: Literal["dispatch", "completion"] = "dispatch"
    """dispatch: groups are trained in slot order (exact). completion: in order of arrival (equal up to rounding)."""
    periods: _Positive = 100
    """How many periods to train."""
    prompts_per_period: _Positive = 8
    """Groups per period."""
    updates_per_period: _Positive = 1
    """Optimizer steps per period."""

    @model_validator(mode="after")
    def _updates_have_groups(self) -> ScheduleConfig:
        if self.updates_per_period > self.prompts_per_period:
            raise ValueError(
                f"updates_per_period = {self.updates_per_period} exceeds prompts_per_period = "
                f"{self.prompts_per_period}: an optimizer step needs at least one group"
            )
        return self


class AlgorithmConfig(_Section):
    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo"] = "grpo"
    """The advantage and the loss, with defaults for the keys below that say "its own" (onbeat/algorithms/)."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt."""
    beta: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL to the reference; 0: no reference is loaded."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """How the KL is estimated, per token: policy - ref; half its square; exp(ref - policy) - (ref - policy) - 1."""
    clip_low: _Fraction | None = None
    """The ratio to the old policy is clipped below 1 - clip_low. Not given: the algorithm's own."""
    clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """… and above 1 + clip_high. Not given: the algorithm's own."""
    scale_advantages: bool | None = None
    """Divide a group's advantages by the standard deviation of its rewards. Not given: the algorithm's own."""
    loss_mean: Literal["sequence", "token", "constant", "sum"] | None = None
    """What the loss is a mean over: sequences of token means; all tokens; sequences of token sums / max_new_tokens;
    sequences of token sums. Not given: the algorithm's own."""
    dynamic_sampling: bool | None = None
    """Replace groups of equal rewards by further prompts, within the period. Not given: the algorithm's own."""
    max_attempts: Annotated[float, Field(ge=1.0)] = 4.0
    """With dynamic sampling: at most so many times prompts_per_period are tried in a period."""
    overlong_buffer: Annotated[int, Field(ge=0)] | None = None
    """Completions lose up to 1 of their reward over the last so many tokens of max_new_tokens. Not given: the
    algorithm's own."""
    mask_truncated: bool = False
    """Completions cut off at max_new_tokens have no loss; they stay in the baseline."""
    importance_cap: Annotated[float, Field(ge=0.0)] = 0.0
    """Weigh each token's loss by min(cap, old / sampler probability), for a sampler that is not quite the policy; 0: do
    not."""
    advantage: SourcePath | None = None
    """`file.py:function` in place of the algorithm's: def advantages(rewards: list[float]) -> list[float]."""
    loss: SourcePath | None = None
    """`file.py:function` in place of the algorithm's: def loss(tokens: onbeat.algorithms.base.Tokens) -> TokenLoss.
    Groups without advantage are trained then, too."""


class SamplingConfig(_Section):
    max_new_tokens: _Positive = 128
    """A completion ends at a stop token or here."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Of sampling and of the trained log-probabilities alike."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A completion also ends with the token that completes one of these texts, and keeps it."""


class CountRange(_Section):
    min: _Positive
    """At least so many."""
    max: _Positive
    """At most."""

    @model_validator(mode="after")
    def _in_order(self) -> CountRange:
        if self.min > self.max:
            raise ValueError(f"generator.count: min = {self.min} exceeds max = {self.max}")
        return self


def _kind_of_count(value: object) -> str:
    return "range" if isinstance(value, dict | CountRange) else "number"


def _known_amounts(resources: dict[str, float]) -> dict[str, float]:
    if not resources or any(amount <= 0 for amount in resources.values()):
        raise ValueError(f"{resources} asks for nothing, or for less: give amounts over 0, such as {{ CPU = 1 }}")
    return resources


Resources = Annotated[dict[str, float], AfterValidator(_known_amounts)]
"""By Ray's names: CPU, GPU, NPU, memory (bytes), or what nodes were started with (`ray start --resources`)."""


class VllmSection(_Section):
    environment: str = ".vllm"
    """The virtual environment that has vLLM, relative to the working directory; `make vllm-env` makes it."""
    servers: tuple[str, ...] = ()
    """Servers that run already, one per generator, instead of our own: unix:PATH or http://127.0.0.1:PORT."""
    tensor_parallel: _Positive = 1
    """Ranks of each server."""
    transfer: Literal["connection", "nccl"] = "connection"
    """How weights get to servers of other machines: over onbeat's own connection, or from GPU to GPU."""
    arguments: dict[str, bool | int | float | str] = {}
    """Further arguments of `vllm serve`: { gpu_memory_utilization = 0.8, dtype = "bfloat16" }."""


class GeneratorConfig(_Section):
    backend: Literal["embedded", "vllm"] = "embedded"
    """The engine that samples. vllm: a vLLM server per generator; not bit-exact, its tokens depend on its batches."""
    count: Annotated[
        Annotated[_Positive, Tag("number")] | Annotated[CountRange, Tag("range")], Discriminator(_kind_of_count)
    ] = 1
    """Generator processes. { min = 1, max = 4 }: as many as keep the trainer busy, found while running."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads per generator; 0: an equal share of the cores, which is larger while the trainer waits."""
    max_sequences: _Positive = 64
    """Sequences decoded at once per generator, admitted by whole groups."""
    cache_gib: Annotated[float, Field(gt=0.0)] = 4.0
    """Memory for keys and values per generator. A group reserves what its completions may need at most, and waits if
    that is not free; one that can never fit is refused."""
    resources: Resources = {"CPU": 1.0}
    """With the launcher ray: what each generator is given of its host, such as { CPU = 4, GPU = 1 } or { NPU = 1 }."""
    vllm: VllmSection = VllmSection()

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest number of processes; the run begins with the lowest."""
        return (self.count, self.count) if isinstance(self.count, int) else (self.count.min, self.count.max)


class TrainerConfig(_Section):
    ranks: _Positive = 1
    """Trainer processes."""
    tensor_parallel: _Positive = 1
    """So many ranks compute one micro-batch together, each with a part of every matrix; divides ranks."""
    shard: bool = False
    """Each rank keeps a share of weights, gradients and optimizer state; the rest comes layer by layer (FSDP2)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; weights, their sums of gradients and the optimizer's state stay float32."""
    offload: bool = False
    """Old policy and reference lie in host memory, and come to the device for their pass; with shard all that a rank
    keeps does, and comes layer by layer."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads per rank; 0: all cores; of a single rank, its share of them while generators of the machine work."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-6
    """AdamW's, after warm-up."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up; linear and cosine end at 0 with the run."""
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's, on matrices."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are clipped to this norm."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: a quarter of the memory, a third more time."""
    pack_tokens: _Positive = 1024
    """Small groups are packed into one forward/backward until it holds this many tokens: more fills the cores little
    better and makes the trainer wait."""
    max_tokens: _Positive = 1536
    """A group with more tokens than this, its prompt counted once, is split, into parts that take no more with the
    prompt (after a long one, half of it beside the prompt): bounds the memory of a pass. A model that cannot share
    prompts is given its completions in batches of so many, prompts included, unless its weights are sharded."""
    resources: Resources = {"CPU": 1.0}
    """With the launcher ray: what each rank is given of its host."""

    @property
    def data_parallel(self) -> int:
        """So many micro-batches are computed at a time."""
        return self.ranks // self.tensor_parallel

    @property
    def shards(self) -> bool:
        """Whether there are ranks to spread the weights over."""
        return self.shard and self.data_parallel > 1

    @model_validator(mode="after")
    def _layout(self) -> TrainerConfig:
        if self.ranks % self.tensor_parallel:
            raise ValueError(
                f"trainer.tensor_parallel = {self.tensor_parallel} does not divide trainer.ranks = {self.ranks}: a "
                f"micro-batch takes {self.tensor_parallel} of them"
            )
        return self


class LoraSection(_Section):
    rank: Annotated[int, Field(ge=0)] = 0
    """Of the trained addition to each weight (LoRA); 0: all weights are trained."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The addition is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get one, such as "q_proj"; none: every linear layer but the head."""


class DataConfig(_Section):
    path: SourcePath
    """Rows with a `prompt`: a .jsonl, .json, .csv or .parquet file, a directory of them, a Hugging Face dataset (by
    directory or name), or `file.py:function` yielding dicts."""
    split: str = "train"
    """Of a Hugging Face dataset."""
    eval_path: SourcePath | None = None
    """Held-out rows, to evaluate on."""
    eval_rows: Annotated[int, Field(ge=0)] = 0
    """Without eval_path and eval_split: so many rows, chosen by the seed, are held out of `path`."""
    eval_split: str = ""
    """The split to evaluate on, of a Hugging Face dataset; of eval_path, if not given, "train"."""
    columns: dict[str, str] = {}
    """What the columns are called in the data, where it differs: { prompt = "question", answer = "info.answer" }."""
    shuffle: bool = True
    """Shuffle each epoch by the seed."""
    max_prompt_tokens: _Positive = 1024
    """Longer prompts are dropped and counted."""


class EvaluationConfig(_Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Periods between evaluations on the held-out prompts; 0: before the first period and after the last."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Completions per held-out prompt for pass@k, sampled as in training, beside the greedy one; 0: greedy alone."""


class CheckpointConfig(_Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Periods between checkpoints; 0: only at the end, and when the run is interrupted."""
    keep: _Positive = 2
    """The newest so many are kept, and the one that evaluated best."""


class TrackConfig(_Section):
    tensorboard: bool = False
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: str = ""
    """A Weights & Biases project to log to."""
    trackio: str = ""
    """A trackio project to log to."""


class RewardFunction(_Section):
    path: SourcePath
    """`file.py:function`, `package.module:function`, or a built-in: exact_match, numeric_answer, format."""
    weight: float = 1.0
    """Its share in the reward."""


class RewardConfig(_Section):
    functions: tuple[RewardFunction, ...] = Field(min_length=1)
    """Reward functions; the first is the main one, which accuracy looks at."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    """A call that takes longer is killed, and its rollouts are unscorable."""
    workers: _Positive = 1
    """Reward processes."""
    memory_gib: Annotated[float, Field(gt=0.0)] = 4.0
    """A reward process that wants more gets MemoryError."""
    sandbox: Literal["off", "strict"] = "off"
    """strict: for rewards that execute what the model wrote. No network, a read-only file system, nobody to signal."""
    environment: tuple[str, ...] = ()
    """Variables that reward processes see beside what Python needs: the key of a judge, say."""
    accuracy_threshold: float = 1.0
    """A completion is right if its main reward is at least this."""


class ClusterConfig(_Section):
    launcher: Literal["local", "ray"] = "local"
    """Where trainer and generators run: as processes of this machine, or wherever Ray places them (docs/cluster.md)."""
    address: str = ""
    """With the launcher ray: the cluster to join, "auto" or HOST:PORT. Empty: a Ray of its own, on this machine."""
    wait_s: Annotated[float, Field(gt=0.0)] = 300.0
    """With the launcher ray: for a process to be placed; a cluster that adds nodes by itself may need longer."""
    listen: str = ""
    """HOST:PORT at which workers of other machines may join (`onbeat worker`); needs a token. Port 0: any."""
    token_file: str = ""
    """A file, readable by its owner alone, with the token that they must know."""

    @model_validator(mode="after")
    def _guarded(self) -> ClusterConfig:
        if self.listen and not self.token_file:
            raise ValueError(f"cluster.listen = {self.listen!r} needs cluster.token_file: nobody joins without a token")
        if self.address and self.launcher != "ray":
            raise ValueError(f'cluster.address = {self.address!r} is for cluster.launcher = "ray"')
        return self


class Config(_Section):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling and shuffling."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sampling: SamplingConfig = SamplingConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraSection = LoraSection()
    data: DataConfig
    reward: RewardConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def num_updates(self) -> int:
        return self.schedule.periods * self.schedule.updates_per_period

    @property
    def why_trainer_threads_fixed(self) -> str | None:
        """Why the trainer does not take fewer threads while generators work; None if it may, as far as can be told
        from a recipe."""
        trainer = self.trainer
        if trainer.threads:
            return "the recipe says how many"
        if trainer.ranks > 1:
            return "several ranks share the cores"
        if self.cluster.launcher != "local":
            return "generators may be on other machines"
        return None if trainer.precision == "float32" else f"it computes in {trainer.precision}"
