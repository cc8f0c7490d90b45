"""Reads deployment files: every key known, every option in its place, before anything is deployed.

Serve itself drops what it does not know (an option at the wrong level, say) and runs with the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shoal.configs.app import AppConfig
from shoal.configs.errors import ConfigError
from shoal.configs.schema import EngineConfig

OUR_IMPORT_PATH = "shoal.deployments.app:build"
DEPLOYMENT_NAMES = {"colocated": ("Gateway",), "separate": ("Gateway", "Tokenizer", "Guard", "ShardGroup")}


def check_file(path: Path) -> dict[str, EngineConfig]:
    """Checks a `serve deploy` file. Returns application name -> its engine, for applications of ours. Raises
    ConfigError naming the path of the first key at fault (applications[0].deployments[1]....)."""
    document = read_yaml(path)
    return {name: config.engine for name, config in check_document(document).items()}


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping.")
    return document


def load_app_config(path: Path) -> AppConfig:
    """The settings in a file: those of its only application of ours, or the file is such settings itself."""
    document = read_yaml(path)
    if "applications" not in document:
        return parse_app_config(document, str(path))
    configs = check_document(document)
    if len(configs) != 1:
        raise ConfigError(f"{path} holds {len(configs)} applications of Shoal; one is needed here.")
    return next(iter(configs.values()))


def check_document(document: Mapping[str, Any]) -> dict[str, AppConfig]:
    """As `check_file`, of a parsed document."""
    from ray.serve.schema import ServeDeploySchema

    _check_keys(document, ServeDeploySchema, "")
    applications = document.get("applications")
    if not isinstance(applications, list) or not applications:
        raise ConfigError("applications must be a list of at least one application.", param="applications")
    ours = {}
    for index, application in enumerate(applications):
        where = f"applications[{index}]"
        if not isinstance(application, dict):
            raise ConfigError(f"{where} must be a mapping.", param=where)
        if application.get("import_path") == OUR_IMPORT_PATH:
            config = parse_app_config(application.get("args") or {}, f"{where}.args")
            _check_deployment_names(application, config, where)
            ours[str(application.get("name", "default"))] = config
    _validate(ServeDeploySchema, document)
    return ours


def parse_app_config(values: Mapping[str, Any], where: str) -> AppConfig:
    """Raises ConfigError naming the first setting at fault, below `where`."""
    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(_known_at(AppConfig, first["loc"][:-1]))
            raise ConfigError(f"{where}: unknown setting {path}; known there: {known}.", param=path) from None
        message = f"{where}: {path}: {first['msg']}; got {first['input']!r}."
        raise ConfigError(message, param=path) from None


def _check_deployment_names(application: Mapping[str, Any], config: AppConfig, where: str) -> None:
    known = DEPLOYMENT_NAMES[config.wiring.mode]
    for index, deployment in enumerate(application.get("deployments") or ()):
        name, path = deployment.get("name"), f"{where}.deployments[{index}]"
        if name not in known:
            message = f"{path}.name: {config.wiring.mode} wiring has no deployment {name!r}; it has {', '.join(known)}."
            raise ConfigError(message, param=f"{path}.name")


# --- Serve's own options ------------------------------------------------------------------------------------------


def _check_keys(value: Any, schema: type[BaseModel], path: str) -> None:
    """Serve's schemas say what is known, but some of them drop what is not: so the keys are compared here."""
    if not isinstance(value, Mapping):
        return
    for key, below in value.items():
        here = f"{path}.{key}" if path else str(key)
        field = schema.model_fields.get(key)
        if field is None:
            raise ConfigError(f"{here}: unknown option.{_belongs(key)}", param=here)
        inner = list(_models_of(field.annotation, str(key)))
        if len(inner) == 1:
            if isinstance(below, list):
                for index, item in enumerate(below):
                    _check_keys(item, inner[0], f"{here}[{index}]")
            else:
                _check_keys(below, inner[0], here)


def _models_of(annotation: Any, key: str) -> Iterable[type[BaseModel]]:
    """The Pydantic models in a type. Serve types some nested options as plain dicts; those are named here."""
    from ray.serve.config import AutoscalingConfig

    if key == "autoscaling_config":
        yield AutoscalingConfig
        return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_of(argument, "")


def _belongs(key: str) -> str:
    """Where an option is known, for the message."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    places = {
        "the top level of the file": ServeDeploySchema,
        "the application": ServeApplicationSchema,
        "the deployment itself, beside its name": DeploymentSchema,
        "the deployment's autoscaling_config": AutoscalingConfig,
    }
    found = [place for place, schema in places.items() if key in schema.model_fields]
    return f" It belongs to {' or '.join(found)}." if found else ""


def _validate(schema: type[BaseModel], document: Mapping[str, Any]) -> None:
    try:
        schema.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise ConfigError(f"{path}: {first['msg']}.", param=path) from None


def _known_at(schema: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    for part in location:
        annotation = schema.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        schema = annotation
    return schema.model_fields
