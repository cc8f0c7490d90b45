"""Deployment files: what Serve would silently ignore is found and placed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.config_check import check_document, check_file, load_app_config, read_yaml

APP = "applications[0]"


@pytest.fixture(scope="module")
def document(repository: Path) -> dict[str, Any]:
    return read_yaml(repository / "configs" / "smollm2-local.yaml")


def application(document: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(document, "applications")[0]


def test_the_shipped_files_are_right(repository: Path) -> None:
    for path in sorted((repository / "configs").glob("*.yaml")):
        assert check_file(path)


def test_settings_come_from_a_deployment_file_or_by_themselves(repository: Path, tmp_path: Path) -> None:
    deployed = load_app_config(repository / "configs" / "smollm2-local.yaml")
    assert (deployed.engine.model, deployed.wiring.mode) == ("smollm2-135m", "separate")
    plain = tmp_path / "plain.yaml"
    plain.write_text("engine: {model: x, max_num_seqs: 4}\nguard: {max_hold_back_chars: 99}\n")
    assert load_app_config(plain).guard.max_hold_back_chars == 99


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        (
            lambda d: application(d)["deployments"][0].update(
                autoscaling_config={
                    "max_ongoing_requests": 10,
                    "target_ongoing_requests": 5,
                    "min_replicas": 1,
                    "max_replicas": 2,
                }
            ),
            f"{APP}.deployments[0].autoscaling_config.max_ongoing_requests",
            "belongs to the deployment itself",
        ),
        (lambda d: d.update(max_ongoing_requests=3), "max_ongoing_requests", "belongs to the deployment itself"),
        (lambda d: application(d).update(num_replicas=2), f"{APP}.num_replicas", "belongs to the deployment itself"),
        (lambda d: application(d).update(applications=[]), f"{APP}.applications", "top level"),
        (
            lambda d: application(d)["deployments"][3]["ray_actor_options"].update(num_cpu=2),
            f"{APP}.deployments[3].ray_actor_options.num_cpu",
            "unknown option",
        ),
        (lambda d: application(d)["args"]["engine"].update(modle="x"), "engine.modle", "known there: model,"),
        (lambda d: application(d)["args"].update(enginee={}), "enginee", "known there: engine, gateway"),
        (
            lambda d: application(d)["args"].update(gateway={"limits": {"max_nn": 1}}),
            "gateway.limits.max_nn",
            "known there: max_body_bytes",
        ),
        (lambda d: application(d)["args"]["engine"].update(max_num_seqs=0), "engine.max_num_seqs", "greater than"),
        (
            lambda d: application(d)["deployments"][1].update(name="Tokeniser"),
            f"{APP}.deployments[1].name",
            "Tokenizer",
        ),
        (lambda d: d.update(applications=[]), "applications", "at least one"),
    ],
)
def test_what_is_wrong_is_found_and_placed(
    document: dict[str, Any], change: Callable[[dict[str, Any]], Any], param: str, says: str
) -> None:
    """O-26."""
    changed = copy.deepcopy(document)
    change(changed)
    with pytest.raises(ConfigError, match=says) as raised:
        check_document(changed)
    assert raised.value.param == param
    assert param in raised.value.message


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "\xff"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        check_file(path)


def test_serve_validates_the_arguments_of_the_builder() -> None:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from shoal.deployments.app import build

    with pytest.raises(ValueError, match="modle"):
        call_user_app_builder_with_args_if_necessary(build, {"engine": {"model": "x", "modle": 1}})
    for mode in ("colocated", "separate"):
        assert call_user_app_builder_with_args_if_necessary(build, {"engine": {"model": "x"}, "wiring": {"mode": mode}})
