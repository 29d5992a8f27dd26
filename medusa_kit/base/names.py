"""Names of base models, as far as they can be judged before a library that computes is imported.

A name that is wrong is told in a second, with the nearest that would do, also without network.
"""

import os
import re
import socket
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from medusa_kit import console
from medusa_kit.errors import (
    DID_YOU_MEAN,
    CheckpointError,
    ConfigError,
    half_pair,
    near_beginning,
    nearest,
)
from medusa_kit.files import near_file
from medusa_kit.paths import expanded
from medusa_kit.settings.engine import DEBUG_NAME, OWN_MODELS

HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
ADDRESS = re.compile(r"(?:https?://[^/]*|huggingface\.co|hf\.co)/+(.*)", re.DOTALL)
CONNECT_SECONDS = 3.0
AGAIN = 10.0  # seconds after which it is tried again whether the Hub can be reached
PART = re.compile(r"-\d{5}-of-\d{5}$")  # at the end of the name of one file of several
PROJECTOR = "mmproj"  # begins the names of llama.cpp's image encoders
PORTS = {"https": 443, "http": 80, "socks4": 1080, "socks5": 1080, "socks5h": 1080}
unreached: set[str] = set()  # addresses of the Hub that did not answer when last tried
_tried: dict[str, tuple[float, bool]] = {}  # by address, when it was, and whether it answered
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # what tells the Hub's client so
SIZE = re.compile(r"(?<![a-z0-9.])\d+(?:\.\d+)?[bm](?![a-z0-9])")  # of a model, in its name
NEAR = 0.75  # least similarity of a name that is offered in place of another


def check_name(name: str) -> None:
    """Raises CheckpointError for a name that no base has, on this machine or on the Hub."""
    if not name.strip():
        raise CheckpointError("the name of the model is empty", hint="leave it out, or name one")
    if name == DEBUG_NAME or name in OWN_MODELS or model_path(name).exists():
        return
    if wrong := half_pair(name):
        raise CheckpointError(f"no model at {name!r}: {wrong}", hint="check the path")
    path = expanded(name)
    if address := ADDRESS.match(name):
        raise CheckpointError(f"{name} is an address, not a name", hint=_id_hint(address[1]))
    if path.suffix == ".gguf":  # reading it says what is missing
        return
    if path.is_absolute() or not HUB_ID.fullmatch(name):
        raise CheckpointError(f"no model at {path}", hint=near_file(path, "check the path"))
    own = [one for one in OWN_MODELS if may_be(name, one)]
    if "/" not in name and (close := nearest(name, own, cutoff=0.8)):
        raise CheckpointError(f"there is no model {name!r}", hint=DID_YOU_MEAN.format(close))
    if use_hub_if_reached() or name in _cached():
        return
    raise not_here(name)


def not_here(name: str) -> CheckpointError:
    """The error, to be raised, for a name of nothing on this machine where the Hub is not asked."""
    by = offline_by()
    why = "cannot be reached" if by is None else f"is not asked, since {by} is set"
    unset = "check the path; a Hub id needs network and perhaps a login"
    return CheckpointError(
        f"there is no folder {name!r} here, and the Hub, which may have a model of that name, "
        f"{why}",
        hint=near_hint(name, unset if by is None else f"check the path, or unset {by}"),
    )


def offline_by() -> str | None:
    """The variable of the environment that keeps the Hub's client from the network; None: none
    does."""
    from huggingface_hub import constants

    if not constants.is_offline_mode() or constants.ENDPOINT in unreached:
        return None
    return next((name for name in OFFLINE if os.environ.get(name)), OFFLINE[0])


def near_hint(name: str, otherwise: str) -> str:
    """Names the nearest of the kit's own models and of those in the Hub's cache."""
    last = name.rpartition("/")[2]
    known = {one.rpartition("/")[2]: one for one in (*_cached(), *OWN_MODELS)}
    known = {short: one for short, one in known.items() if may_be(last, short)}
    close = nearest(last, known, cutoff=NEAR) or near_beginning(last, known)
    return otherwise if close is None else DID_YOU_MEAN.format(known[close])


def may_be(typed: str, known: str) -> bool:
    """Whether a known model may be meant by a name: not where the name has another size, or lacks a
    word before its end, since that is another model."""
    sizes, known_sizes = (SIZE.findall(name.lower()) for name in (typed, known))
    parts = typed.lower().split("-")
    found = [
        word in typed.lower() or bool(nearest(word, parts)) for word in known.lower().split("-")
    ]
    while found and not found[-1]:
        found.pop()
    return all(found) and (not sizes or sizes == known_sizes)


def model_path(name: str | Path) -> Path:
    """Where a base of this name lies, if it is on this machine: a folder that holds one GGUF model
    and no other stands for its file. Raises CheckpointError for a folder with several."""
    path = expanded(name)
    described = ("config.json", "adapter_config.json")
    if not path.is_dir() or any((path / one).exists() for one in described):
        return path
    files = sorted(file for file in path.glob("*.gguf") if not file.name.startswith(PROJECTOR))
    models = {PART.sub("", file.stem): file for file in reversed(files)}  # the first part of each
    if len(models) > 1:
        names = ", ".join(file.name for file in sorted(models.values()))
        raise CheckpointError(
            f"{path} holds {len(models)} models: {names}", hint=f"name one of them: {files[0]}"
        )
    return next(iter(models.values()), path)


def use_hub_if_reached() -> bool:
    """Whether the Hub may be asked. While it cannot be reached its client is told so: else it
    tries each file again for half a minute, also those that are in its cache."""
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    if constants.is_offline_mode() and endpoint not in unreached:  # by the environment
        return False
    last, answered = _tried.get(endpoint, (-AGAIN, False))
    if (now := time.monotonic()) >= last + AGAIN:
        answered = reached(endpoint)
        _tried[endpoint] = now, answered
    constants.HF_HUB_OFFLINE = not answered
    if answered:
        unreached.discard(endpoint)
    elif endpoint not in unreached:
        console.note(f"{endpoint} cannot be reached: only what is on this machine is used")
        unreached.add(endpoint)
    return answered


def reached(endpoint: str) -> bool:
    """Whether a connection can be made with the Hub, or with the proxy that it is asked through.
    Raises ConfigError for an endpoint that is no address."""
    host, port = _host_and_port(endpoint)
    if host is None or port is None:
        raise ConfigError(
            f"HF_ENDPOINT {endpoint!r} is no address; expected https://… or http://…",
            hint="unset HF_ENDPOINT to use https://huggingface.co",
        )
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.partition(":")[0].lower()) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        host, port = _host_and_port(proxy if "//" in proxy else f"http://{proxy}")
        if host is None or port is None:  # the Hub's client says what is wrong with it
            return True
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, UnicodeError):  # the latter for a name that no host can have
        return False
    return True


def _host_and_port(address: str) -> tuple[str | None, int | None]:
    try:
        url = urlsplit(address)
        return url.hostname, url.port or PORTS.get(url.scheme)
    except ValueError:  # brackets, or a port that is no number
        return None, None


def _id_hint(path: str) -> str:
    """`path`: of an address of the Hub, which begins with the model's id."""
    model = "/".join(path.split("?")[0].split("/")[:2])
    if "/" in model and HUB_ID.fullmatch(model):
        return f"name the model by its id on the Hub: {model}"
    return "give the path of a folder or GGUF file, or a model's id on the Hub"


def _cached() -> list[str]:
    """Hub ids of models of which something is in the Hub's cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)
