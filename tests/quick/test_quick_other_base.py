"""A report is of the base that lies under the run's path now, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.debug_model import small_tokenizer
from support.tiny_models import model_of

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.errors import ConfigError
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request

Build = Callable[..., Request]


@pytest.fixture
def finished(request_for: Build, tmp_path: Path) -> Request:
    tokenizer = small_tokenizer(CHATML_TEMPLATE)
    model = model_of("llama", vocab_size=len(tokenizer), pad_token_id=None, bos_token_id=None)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    request = request_for(model=str(tmp_path / "base"))
    run(prepared(request))
    return request


def test_a_finished_run_of_another_config_is_refused(finished: Request, tmp_path: Path) -> None:
    path = tmp_path / "base/config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 7.0
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quick.json was made with another config of the base"):
        run(prepared(finished))


def test_a_finished_run_of_another_base_is_refused(finished: Request, tmp_path: Path) -> None:
    run(prepared(finished))  # of its own base it is told
    model = model_of("llama", vocab_size=len(small_tokenizer(CHATML_TEMPLATE)), pad_token_id=None,
                     bos_token_id=None)  # fmt: skip
    model.model.layers[0].mlp.up_proj.weight.data *= 1.1
    model.save_pretrained(tmp_path / "base")
    before = {path: path.read_bytes() for path in finished.output.glob("*.json")}
    with pytest.raises(ConfigError, match="is another model than the one that this run began"):
        run(prepared(finished))
    assert before == {path: path.read_bytes() for path in finished.output.glob("*.json")}
