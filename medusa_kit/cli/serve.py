"""`medusa-kit serve`: an OpenAI-compatible server of one model."""

import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from medusa_kit import console
from medusa_kit.cli import engine_options, options
from medusa_kit.errors import MedusaKitError, UsageError
from medusa_kit.installing import extra
from medusa_kit.settings.option import options_of
from medusa_kit.settings.serve import ServeConfig

PLACE = "serving"  # the parameter that stands where the server's options go


def with_serving(command: Callable[..., None]) -> Callable[..., None]:
    """Put the server's options where a command with the engine's has its parameter `serving`. It
    gets those that were given, by the command line or the section `serve` of the engine file."""
    shown = [options.parameter(one) for one in options_of(ServeConfig).values()]

    @functools.wraps(command)
    def run(context: typer.Context, **arguments: Any) -> None:
        values = {one.name: arguments.pop(one.name) for one in shown}
        given = {name: value for name, value in values.items() if options.was_given(context, name)}
        file = arguments.get("config")
        command(context=context, **arguments, **{PLACE: _of_file(file) | given})

    parameters = options.parameters_with(command, PLACE, shown)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _of_file(path: Any) -> dict[str, Any]:
    if path is None:
        return {}
    from medusa_kit.settings.engine_file import read_engine_file

    return dict(read_engine_file(path).serve)


@with_serving
@engine_options.with_engine()
def serve(
    loading: engine_options.Loading = engine_options.GIVEN,
    serving: Mapping[str, Any] = options.GIVEN,
) -> None:
    """Serve a model to OpenAI's clients: many at once, in one batch, until SIGTERM or Ctrl-C."""
    config = ServeConfig(**serving)
    try:
        from medusa_kit.engine.heads_folder import HeadsFolder
        from medusa_kit.serve.operations.guard import warn_of_open_server
        from medusa_kit.serve.operations.keys import load_keys
        from medusa_kit.serve.operations.open_files import with_room_for_connections
        from medusa_kit.serve.recording import check_recording
        from medusa_kit.serve.server import bind
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
            raise
        raise UsageError(
            f"the server needs the package {error.name}",
            hint=extra("serve"),
        ) from error
    if config.replicas is not None:
        from medusa_kit.serve.replicated.run import check_ray, run_replicas

        check_ray(config.ray_address)
    keys = load_keys(config.api_key_file)
    HeadsFolder(config.heads_dir, config.heads_hub or ())  # which is told before the model loads
    if config.record is not None:
        check_recording(config.record)
    warn_of_open_server(config.host, keys)
    config = with_room_for_connections(config)
    bound = bind(config.host, config.port)
    with bound:
        if config.replicas is not None:
            return run_replicas(loading, config, keys, bound)
        import medusa_kit
        from medusa_kit.data.without_template import tell_template

        engine = medusa_kit.load(**loading)
        tell_template(engine.base.tokenizer, engine.base.info.name)
        _run(engine, config, keys, bound)


def _run(engine: Any, config: Any, keys: Any, bound: Any) -> None:
    from medusa_kit.serve.app import create_app
    from medusa_kit.serve.server import first_lines, listen, server_for, url_of
    from medusa_kit.serve.service import Service

    service = Service(engine, config)
    service.prepare()

    def ready() -> None:
        names = ", ".join(entry["id"] for entry in service.names.entries())
        console.note(first_lines(names, url_of(bound), f"{config.max_rows} requests at once"))
        if config.record is not None:
            console.note(f"recording prompts and answers in {config.record}")

    server = server_for(create_app(service, keys=keys), service, ready)
    try:
        listen(server, config, bound)
    finally:
        service.close(drain=False)
    if server.failure is not None:
        raise MedusaKitError(f"the server has ended: {server.failure}", hint="start it again")
    console.note("the server has ended")
    gc.freeze()  # else Python looks through all it has once more, for seconds on a busy machine
