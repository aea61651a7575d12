"""What a server says of itself: its models, its version, its counters of speculation."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peagle.bench.client import error_message
from peagle.bench.counters import Counters, parse_counters
from peagle.bench.settings import BenchServeConfig
from peagle.errors import PeagleError, one_line

if TYPE_CHECKING:
    import aiohttp

_SHORT_SECONDS = 30.0  # for these short questions


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`model` is the name to ask for; `models` the server's list as it stands; `version` None if it does not say."""

    model: str
    models: list[dict[str, Any]]
    version: str | None


async def read_server(session: "aiohttp.ClientSession", config: BenchServeConfig) -> ServerInfo:
    """Look the model up before anything is sent to it. Raises PeagleError."""
    status, text = await _get(session, config.server + "/v1/models", config)
    if status in (401, 403):
        raise PeagleError(
            f"{config.server} refuses the key (HTTP {status}): give --api-key, or OPENAI_API_KEY in the environment"
        )
    if status != 200:
        raise PeagleError(
            f"{config.server}/v1/models answers HTTP {status} ({error_message(text)}): --base-url must be that of a "
            "server with OpenAI's API"
        )
    try:
        models = json.loads(text)["data"]
        names = [model["id"] for model in models]
        served = ", ".join(names) or "none"
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PeagleError(f"{config.server}/v1/models is no list of models: check --base-url") from None
    if config.model is not None and config.model not in names:
        raise PeagleError(f"model {config.model!r} is not served at {config.server}: there is {served}; name that")
    if config.model is None and len(names) != 1:
        raise PeagleError(f"{config.server} serves {served}: choose one with --model")
    return ServerInfo(config.model or names[0], models, await _version(session, config))


def check_fits(server: ServerInfo, config: BenchServeConfig) -> None:
    """Raise PeagleError for random prompts that the server would refuse one by one; others' tokens are not known."""
    if config.dataset_name != "random":
        return
    entry = next((model for model in server.models if model["id"] == server.model), {})
    most, answer = entry.get("max_model_len"), config.output_len or config.random_output_len
    if isinstance(most, int) and config.random_input_len + answer > most:
        raise PeagleError(
            f"prompts of {config.random_input_len} tokens and answers of {answer} exceed the {most} that the "
            f"server takes with {server.model}: lower --random-input-len or --random-output-len"
        )


async def read_counters(session: "aiohttp.ClientSession", config: BenchServeConfig) -> Counters | None:
    """The counters of speculation now; None if the server has none, or none to show."""
    try:
        status, text = await _get(session, config.server + "/metrics", config)
    except PeagleError:  # it may be gone after a load
        return None
    return parse_counters(text) if status == 200 else None


async def _version(session: "aiohttp.ClientSession", config: BenchServeConfig) -> str | None:
    """As vLLM, SGLang and peagle answer it, each at its own place."""
    for path, key in (("/version", "version"), ("/get_server_info", "version")):
        try:
            status, text = await _get(session, config.server + path, config)
            if status == 200:
                return str(json.loads(text)[key])
        except (PeagleError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


async def _get(session: "aiohttp.ClientSession", url: str, config: BenchServeConfig) -> tuple[int, str]:
    import aiohttp

    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_SHORT_SECONDS)) as response:
            return response.status, await response.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise PeagleError(
            f"no server answers at {config.server} ({one_line(error)}): start one (peagle serve MODEL), or give its "
            "address with --base-url"
        ) from None
