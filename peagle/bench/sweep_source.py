"""Where the runs of a sweep come from: engines of this process that share one target, a head each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from peagle.bench.closed_loop import Job, Run, answer_all
from peagle.bench.sweep_plan import Setup
from peagle.bench.sweep_settings import EAGLE3, P_EAGLE, PLAIN, SweepConfig
from peagle.config import EngineConfig
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters import storage
from peagle.drafters.checkpoint import load_drafter, resolve_head
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.head_config import config_from_dict
from peagle.engine.engine import LLM
from peagle.engine.slots import SamplingMode
from peagle.engine.speculation import FixedK, check_depth, trained_depth
from peagle.errors import PeagleError
from peagle.models.hub import resolve_model
from peagle.models.target import Target, load_target, read_spec
from peagle.models.tokenizer import chat_prompt, encode
from peagle.prompt_file import PromptRow
from peagle.sampling import SamplingParams

_BLOCK_SIZE = 16
_WARM_UP_TOKENS = 12  # of answers that nobody times: prompts' kernels are compiled, the allocator has filled
_SEED_STEP = 4099  # between prompts: acceptance by chance reads a table from the seed on, the position added

Rates = Callable[[str, Setup], Sequence[float]]  # prompt set, setup -> conditional rate of each draft
TokenSets = Mapping[str, Sequence[Sequence[int]]]  # prompt set -> tokens of its prompts


class Source(Protocol):
    """What can answer a prompt set in every way to decode that a sweep compares."""

    def warm_up(self, setups: Sequence[Setup]) -> Iterator[str]:
        """Do everything that is slow only the first time; says what comes next."""

    def run(self, dataset: str, setup: Setup, concurrency: int) -> Run:
        """Answer the prompts of one cell."""


class EngineSource:
    """An engine per method, all with the same target; K is changed between runs."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Eagle3Drafter],
        prompts: TokenSets,
        config: SweepConfig,
        *,
        plain: bool = True,
        pack: bool = True,
        rates: Rates | None = None,
    ) -> None:
        """`drafters` by method; `plain` adds an engine without one. With `rates`, acceptance is SYNTHETIC."""
        self.target, self._prompts, self._config, self._rates = target, prompts, config, rates
        self._params = SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, ignore_eos=config.ignore_eos
        )
        engine = _engine_config(target, prompts, config)
        most, first = max(config.k), next(iter(prompts))
        self._engines: dict[str, LLM] = {}
        for method, drafter in drafters.items():
            profile = rates(first, Setup(method, most)) if rates is not None else None
            self._engines[method] = LLM.from_parts(target, drafter, most, engine, pack=pack, synthetic_rates=profile)
        if plain:
            self._engines[PLAIN] = LLM.from_parts(target, None, 0, engine, pack=pack)

    @classmethod
    def load(
        cls, model: str, heads: Mapping[str, Path | str], rows: Mapping[str, Sequence[PromptRow]], config: SweepConfig,
        *, plain: bool,
    ) -> Self:  # fmt: skip
        """Load target and heads and tokenize the prompts, in the target's chat template if it has one."""
        device = resolve_engine_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        layers = read_spec(resolve_model(model)).num_layers
        for method, head in heads.items():
            _check_head(method, head, layers, config.k)
        target = load_target(model, dtype=dtype, device=device)
        drafters = {
            method: load_drafter(head, target.model, dtype=dtype, device=device, target_name=target.name)
            for method, head in heads.items()
        }
        tokens = {
            name: [encode(target.tokenizer, chat_prompt(target.tokenizer, row.messages)) for row in each]
            for name, each in rows.items()
        }
        return cls(target, drafters, tokens, config, plain=plain)

    def warm_up(self, setups: Sequence[Setup]) -> Iterator[str]:
        dataset = next(iter(self._prompts))
        mode = SamplingMode(drawn=self._params.temperature > 0)
        for setup in setups:
            llm = self._engine(dataset, setup)
            on_gpu = llm.core.device.type == "cuda"
            steps = llm.core.warm_up([setup.num_drafts], (mode,)) if on_gpu else ()
            for size, _ in steps:
                yield f"{setup.label}, steps of {size}"
            for shape in llm.core.warm_up_prompts():
                yield f"{setup.label}, prompts of up to {shape.rows} tokens"
            for concurrency in self._config.concurrency if on_gpu else (1,):
                yield f"{setup.label}, prompts of {concurrency}"
                jobs = self._jobs(dataset, concurrency)
                short = SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=self._params.temperature)
                answer_all(llm, jobs, short, concurrency)

    def run(self, dataset: str, setup: Setup, concurrency: int) -> Run:
        jobs = self._jobs(dataset, self._config.prompts_of(concurrency))
        return answer_all(self._engine(dataset, setup), jobs, self._params, concurrency)

    def _engine(self, dataset: str, setup: Setup) -> LLM:
        """The engine of a setup, made to draft its K and, by chance, to accept as on that prompt set."""
        llm = self._engines[setup.method]
        llm.core.policy = FixedK(setup.num_drafts)
        if self._rates is not None and llm.core.synthetic is not None:
            llm.core.synthetic.change(self._rates(dataset, setup))
        return llm

    def _jobs(self, dataset: str, count: int) -> list[Job]:
        """The first prompts, begun again where there are fewer. A prompt's seed is its own, in every cell."""
        prompts = self._prompts[dataset]
        places = [index % len(prompts) for index in range(count)]
        return [Job(place, prompts[place], self._config.seed + _SEED_STEP * place) for place in places]


def _engine_config(target: Target, prompts: TokenSets, config: SweepConfig) -> EngineConfig:
    """Sized for the longest prompt and answer, for as many as are in flight at most: several engines share a device."""
    context = target.spec.max_position_embeddings
    for name, each in prompts.items():
        longest = max(map(len, each))
        if longest >= context:
            raise PeagleError(
                f"{name} has a prompt of {longest} tokens: the target's context is {context}, leave that prompt out"
            )
    length = max(len(ids) for each in prompts.values() for ids in each) + config.max_tokens + 2 * max(config.k) + 1
    blocks = -(-length // _BLOCK_SIZE)
    most = max(config.concurrency)
    return EngineConfig(
        dtype=config.dtype,
        device=config.device,
        max_model_len=min(blocks * _BLOCK_SIZE, context),
        max_num_seqs=most,
        block_size=_BLOCK_SIZE,
        num_kv_blocks=most * (blocks + 1),
        prompt_graphs=config.prompt_graphs,
        enable_prefix_caching=False,  # or a repeat would find the prompts of the one before
    )


def _check_head(method: str, head: Path | str, layers: int, drafts: Sequence[int]) -> None:
    """Before anything is loaded: the head is of the method's kind. Warns of K beyond what it was trained for."""
    config = config_from_dict(storage.read_config(resolve_head(head)), target_layers=layers, where=f"head {head}")
    if config.parallel != (method == P_EAGLE):
        flag = {P_EAGLE: "--head", EAGLE3: "--eagle3-head"}
        other = EAGLE3 if method == P_EAGLE else P_EAGLE
        raise PeagleError(f"{head} is of the kind {config.kind}: give it as {flag[other]}, not as {flag[method]}")
    check_depth(max(drafts), trained_depth(head))
