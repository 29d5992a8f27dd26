"""The machine and the versions that figures were measured with."""

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.origin import PROMPTS, digest_of
from medusa_kit.base.processor import processor_name
from medusa_kit.bench.about import About
from medusa_kit.bench.verify_report import LAYER_BY_LAYER, VerifyReport
from medusa_kit.engine.engine import Engine
from medusa_kit.files import write_json
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.plan import TreePlan
from medusa_kit.version import __version__


def bench_about(
    engines: Mapping[str, Engine],
    prompts: str,
    sampling: SamplingParams,
    asked: Any = None,
    **more: Any,
) -> About:
    """The first engine, and the heads of all; `prompts`: what they are called, `asked`: what they
    say."""
    engine = next(iter(engines.values()))
    return About.of(
        prompts,
        sampling,
        base=engine.base.info.as_dict(),
        weights=engine.weights,
        activations=engine.activations,
        cache=engine.cache,
        lossy=bool(engine.lossy_by),
        drafter=engine.own_drafter,
        heads_refused=engine.heads_refused,
        attention=engine.attention.report(),
        setup=describe_setup(engine),
        encoding=engine.base.encoding,
        base_config=engine.base.computation,
        heads={name: heads_digest(each) for name, each in engines.items()},
        trees={name: tree_digest(each) for name, each in engines.items() if each.heads},
        **asked_digest(asked),
        **more,
    )


def write_verify(
    reports: Mapping[str, VerifyReport],
    engine: Engine,
    prompts: str,
    path: Path,
    asked: Any = None,
) -> None:
    """The reports by name, the greedy one first; `prompts`: what they are called, `asked`: what
    they say."""
    compared_with = reports["greedy"].reference
    if engine.activations == FLOAT32:
        layers = ", layer by layer" if compared_with == LAYER_BY_LAYER else ""
        compared_with = f"plain transformers with {engine.weights} weights{layers}"
    about = About.model_validate({
        "prompts": prompts,
        **asked_digest(asked),
        "base": engine.base.info.as_dict(),
        "activations": engine.activations,
        "lossy": engine.base.info.lossy,
        "held_to": compared_with,
        "encoding": engine.base.encoding,
        "base_config": engine.base.computation,
        "heads": heads_digest(engine),
        "trees": {"": tree_digest(engine)} if engine.heads else {},
        "setup": describe_setup(engine),
    })  # fmt: skip
    parts = {name: replace(report, about=about).to_json() for name, report in reports.items()}
    write_json(path, parts)


def asked_digest(asked: Any) -> dict[str, str]:
    return {} if asked is None else {PROMPTS: digest_of(asked)}


def describe_setup(engine: Engine) -> dict[str, Any]:
    """Machine, versions and what runs the steps of this engine."""
    import transformers

    return {
        "steps_run_by": engine.steps_run_by,
        "processor": processor_name(engine.base.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "medusa_kit": __version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def heads_digest(engine: Engine) -> str | None:
    """What identifies the heads in reports, as they are in memory: other ones may lie in their
    folder by now. None: there are none."""
    return None if engine.heads is None else engine.heads.digest


def tree_digest(engine: Engine) -> str:
    return (engine.plan or TreePlan.of_tree(engine.tree)).digest
