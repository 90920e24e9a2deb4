"""The generating side of a run, put together: launcher, model, prompts, generators, rewards, loader, weight channel.

`onbeat train` (controller.py) adds a trainer process and the loop; a training script of your own (own_loop.py) is the
trainer and the loop. Both get this.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from onbeat.algorithms.catalogue import algorithm_of
from onbeat.cluster.launcher import open_launcher
from onbeat.config import Config, DataConfig
from onbeat.control import Answer
from onbeat.errors import InputError, WorkerError
from onbeat.inputs import inputs_of
from onbeat.interrupt import in_thread
from onbeat.ledger import Ledger
from onbeat.loader import LoaderSettings, PeriodicLoader
from onbeat.messages import WorkerSettings
from onbeat.model_source import obtain_model
from onbeat.prompts.codec import Codec
from onbeat.prompts.rows import Row, read_rows
from onbeat.prompts.source import PromptCursor, encode_rows, hold_out
from onbeat.protocols import Evaluated, Launcher, Tracer
from onbeat.reward.scorer import RewardScorer
from onbeat.rollout.client import GeneratorProcess
from onbeat.rollout.crew import Crew
from onbeat.rollout.joined import Reception
from onbeat.rollout.pool import Pool
from onbeat.rollout.vllm.server import check_config
from onbeat.types import GroupRequest, Prompt, Sampling
from onbeat.weights.memory import MemoryChannel
from onbeat.weights.nccl import Courier

MAX_GENERATORS = 256
"""That somebody may ask a running run for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    config: Config
    launcher: Launcher
    model_dir: Path
    prompts: PromptCursor
    inputs: dict[str, str]
    """What the bits rest on (inputs.py)."""
    held_out: list[Prompt]
    pool: Pool
    scorer: RewardScorer
    loader: PeriodicLoader
    channel: MemoryChannel
    crew: Crew
    reception: Reception
    sampling: Sampling
    closing: AsyncExitStack
    """What is undone when the session ends, the last first."""

    def worker_settings(
        self, name: str, checkpoint: Path | None = None, config: Config | None = None
    ) -> WorkerSettings:
        """`config`: if it is not the one the run began with."""
        return WorkerSettings(
            config=(config or self.config).model_dump_json(),
            model_dir=str(self.model_dir),
            name=name,
            checkpoint=str(checkpoint) if checkpoint is not None else None,
        )

    async def evaluate(self, version: int) -> Evaluated:
        """The held-out prompts, completed by the version the generators serve."""
        return await self.loader.evaluate(version, self.held_out, self.config.evaluation.samples)

    def scale(self, num_generators: int) -> Answer:
        """From now on so many; they start and leave while the run goes on."""
        lowest, highest = self.config.generator.bounds
        elastic = lowest < highest
        if num_generators < 1 or (elastic and not lowest <= num_generators <= highest):
            bounds = f"between {lowest} and {highest} (generator.count)" if elastic else "at least 1"
            return Answer(f"generators={num_generators}: there must be {bounds}", done=False)
        if num_generators > MAX_GENERATORS and self.config.cluster.launcher == "local":
            return Answer(f"generators={num_generators}: at most {MAX_GENERATORS} on one machine", done=False)
        before = self.crew.wanted
        self.crew.want(num_generators)
        return Answer(f"{num_generators} generators instead of {before}", done=True)

    def counters(self) -> dict[str, int]:
        """What was dropped, done again or lost in the run so far."""
        pool, scorer = self.pool.counts, self.scorer.counts
        return {
            "num_duplicate_messages": pool.duplicate,
            "num_late_messages": pool.late,
            "num_resent_samples": pool.resent,
            "num_hedged_samples": pool.hedged,
            "num_lost_generators": pool.lost_workers,
            "num_reward_failures": scorer.failures,
            "num_reward_timeouts": scorer.timeouts,
            "num_reward_restarts": scorer.restarts,
        }

    def why_not_exact(self) -> str | None:
        """None if the run's weights do not depend on schedule and workers; else the reason. After the first publish."""
        if self.config.schedule.order != "dispatch":
            return f'schedule.order = "{self.config.schedule.order}" trains in order of arrival'
        if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not _has_avx2():
            return f"bit-identical rows are established on Linux x86_64 with AVX2, not on {platform.platform()}"
        variances = [g.row_variance for g in self.pool.generators if isinstance(g, GeneratorProcess)]
        return next((variance for variance in variances if variance is not None), None)


def _has_avx2() -> bool:
    return " avx2 " in Path("/proc/cpuinfo").read_text()


def _couriers(config: Config, launcher: Launcher) -> Callable[[str], Awaitable[Courier]] | None:
    """None unless the recipe wants weights to go another way than over the connection."""
    vllm = config.generator.vllm
    if config.generator.backend != "vllm" or vllm.transfer != "nccl":
        return None
    return lambda name: Courier.start(launcher, name, num_ranks=1 + vllm.tensor_parallel)


@asynccontextmanager
async def open_session(
    config: Config, run_dir: Path, trace: Tracer, say: Callable[[str], None], warn: Callable[[str], None]
) -> AsyncIterator[Session]:
    """Start everything that generates and scores; end it, whatever happens inside."""
    if config.generator.backend == "vllm":
        check_config(config)
    async with AsyncExitStack() as stack:
        launcher = open_launcher(config, run_dir / "logs", warn)
        stack.push_async_callback(launcher.close)
        launcher.prepare(uses_torch=True)
        # Before the model: mistakes in it show soonest. In a thread: the run can be asked and interrupted meanwhile.
        rows = await in_thread(read_data, config.data)
        model_dir = await obtain_model(config.model.path, launcher)
        codec = Codec(model_dir)
        prompts, held_out, dropped = await in_thread(encode, rows, codec, config)
        tell_dropped(dropped, config.data.max_prompt_tokens, run_dir / "dropped.txt", warn)
        check_lengths(codec, prompts + held_out, config.sampling.max_new_tokens)
        sampling = sampling_of(config, codec)
        scorer = RewardScorer(
            launcher,
            config.reward.functions,
            decode=codec.decode,
            num_workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
            memory_bytes=int(config.reward.memory_gib * 2**30),
            strict=config.reward.sandbox == "strict",
        )
        stack.push_async_callback(scorer.close)

        async def start_generator(name: str) -> GeneratorProcess:
            generator = await GeneratorProcess.start(launcher, config.generator.backend, session.worker_settings(name))
            if (reason := reception.why_not_exact_with(generator)) is not None:  # it may be on another host
                generator.kill()
                raise WorkerError(f"{name} cannot be used: {reason}")
            return generator

        pool = Pool(trace, warn)
        channel = MemoryChannel(pool)
        stack.callback(channel.close)
        crew = Crew(pool, start_generator, channel.bring, say, warn)
        reception = Reception(
            pool,
            crew,
            lambda name: session.worker_settings(name),
            warn,
            only_local=config.lora.rank > 0,
            start_courier=_couriers(config, launcher),
        )
        stack.push_async_callback(reception.close)
        session = Session(
            config=config,
            launcher=launcher,
            model_dir=model_dir,
            prompts=PromptCursor(prompts, seed=config.seed, shuffle=config.data.shuffle),
            inputs=inputs_of(config, prompts, held_out, model_dir),
            held_out=held_out,
            pool=pool,
            scorer=scorer,
            loader=PeriodicLoader(
                loader_settings(config, sampling), pool, scorer, Ledger(run_dir / "ledger.jsonl"), trace
            ),
            channel=channel,
            crew=crew,
            reception=reception,
            sampling=sampling,
            closing=stack,
        )
        await asyncio.gather(start_generators(session), scorer.start())
        check_room(pool, prompts, config.algorithm.group_size, sampling)
        if held_out:
            check_room(pool, held_out, max(1, config.evaluation.samples), sampling)
        yield session


@dataclass(frozen=True, slots=True)
class _Rows:
    train: list[Row]
    held_out: list[Row]
    """Of a source or a split of their own."""


def read_data(data: DataConfig) -> _Rows:
    rows = read_rows(data.path, columns=data.columns, split=data.split)
    if data.eval_path:
        return _Rows(rows, read_rows(data.eval_path, "data.eval_path", data.columns, data.eval_split or "train"))
    if data.eval_split == data.split:
        raise InputError(f"data.eval_split = {data.eval_split!r} is what is trained on (data.split); name another")
    if data.eval_split:
        return _Rows(rows, read_rows(data.path, columns=data.columns, split=data.eval_split))
    return _Rows(rows, [])


def encode(rows: _Rows, codec: Codec, config: Config) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Prompts to train on, held-out prompts, names of those that are left out for their length."""
    limit = config.data.max_prompt_tokens
    prompts, dropped = encode_rows(rows.train, codec, limit)
    if not rows.held_out:
        return *hold_out(prompts, config.data.eval_rows, config.seed), dropped
    held_out, also_dropped = encode_rows(rows.held_out, codec, limit)
    return prompts, held_out, dropped + [f"{name} of the held-out ones" for name in also_dropped]


def tell_dropped(dropped: list[str], limit: int, file: Path, warn: Callable[[str], None]) -> None:
    file.unlink(missing_ok=True)
    if dropped:
        file.write_text("".join(f"{name}\n" for name in dropped))
        more = f" … (all of them in {file})" if len(dropped) > 8 else ""
        warn(
            f"{len(dropped)} prompts are left out, having no token or more than data.max_prompt_tokens = {limit}: "
            f"{', '.join(dropped[:8])}{more}"
        )


def sampling_of(config: Config, codec: Codec) -> Sampling:
    """A stop string that is a special token is found by its number: it is not in the text."""
    special = {text: token for text in config.sampling.stop if (token := codec.special_token(text)) is not None}
    return Sampling(
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys([*codec.stop_token_ids, *special.values()])),
        seed=config.seed,
        stop=tuple(text for text in config.sampling.stop if text not in special),
    )


async def start_generators(session: Session) -> None:
    """As many as the recipe wants. (`closing` ends them before the launcher does: no end of theirs is news then.)"""
    session.closing.push_async_callback(session.crew.close)
    await session.crew.open(session.config.generator.bounds[0])
    session.reception.remember()


def check_lengths(codec: Codec, prompts: list[Prompt], max_new_tokens: int) -> None:
    """What the model has no positions for must not be generated."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if codec.max_positions is not None and longest + max_new_tokens > codec.max_positions:
        raise InputError(
            f"the longest prompt has {longest} tokens; sampling.max_new_tokens = {max_new_tokens} more would exceed "
            f"the model's {codec.max_positions} positions; lower that or data.max_prompt_tokens"
        )


def check_room(pool: Pool, prompts: list[Prompt], group_size: int, sampling: Sampling) -> None:
    """A group that no generator could ever hold is better refused now than in the middle of the run."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    samples = tuple(range(group_size))
    request = GroupRequest(
        stream="train", period=0, slot=0, samples=samples, token_ids=longest.token_ids, sampling=sampling
    )
    if (reason := pool.why_never(request)) is not None:
        raise InputError(f"prompt {longest.prompt_id}: {reason}")


def loader_settings(config: Config, sampling: Sampling) -> LoaderSettings:
    algorithm = algorithm_of(config.algorithm, loads="advantage")
    buffer = config.algorithm.overlong_buffer
    return LoaderSettings(
        mode=config.schedule.mode,
        order=config.schedule.order,
        group_size=config.algorithm.group_size,
        sampling=sampling,
        algorithm=algorithm,
        overlong_buffer=int(algorithm.overlong_share * sampling.max_new_tokens) if buffer is None else buffer,
        masks_truncated=config.algorithm.mask_truncated,
        max_attempts=config.algorithm.max_attempts,
        elide=config.algorithm.loss is None and config.algorithm.beta == 0,
        elide_at_start=config.algorithm.loss is None and config.algorithm.kl != "k1",
        updates_per_period=config.schedule.updates_per_period,
        pack_tokens=min(config.trainer.pack_tokens, config.trainer.max_tokens),
        num_ranks=config.trainer.data_parallel,
        rounds=config.trainer.shards,
    )
