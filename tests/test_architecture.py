"""The house rules that a machine can check: who imports whom, how long files grow, what the wheel will hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "kernels": {"configs"},
    "kvcache": {"configs", "kernels"},
    "model_shards": {"configs", "kernels", "kvcache"},
    "guardrails": {"configs"},
    "deployments": {"configs", "kernels", "kvcache", "model_shards", "guardrails"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
"""A Triton kernel is one program: its state cannot be handed to helpers as cheaply as elsewhere."""


def tracked(*patterns: str) -> list[Path]:
    """Files of the working tree that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := REPOSITORY / name).is_file()]


def layer(path: Path) -> str:
    return path.relative_to(REPOSITORY).parts[0]


def show(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(REPOSITORY)}:{line}: {text}"


def product_files() -> list[Path]:
    return [path for path in tracked("*.py") if layer(path) in MAY_IMPORT]


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of a file, also those inside functions. Relative ones are made absolute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("shoal", *path.relative_to(REPOSITORY).with_suffix("").parts)[: -node.level]
                base = ".".join((*package, base)).rstrip(".")
            # `from shoal import kernels` names its layer in the alias, not in the module.
            names = [f"shoal.{alias.name}" for alias in node.names] if base == "shoal" else [base]
            found += [(node.lineno, name) for name in names]
    return found


def test_imports_point_down_only() -> None:
    upward = []
    for path in product_files():
        own = layer(path)
        for line, name in imported_modules(path):
            root, _, rest = name.partition(".")
            target = rest.partition(".")[0] if root == "shoal" else root
            if root != "shoal" and root in MAY_IMPORT:
                upward.append(show(path, line, f"imports bare `{root}`; write shoal.{root}"))
            elif target in MAY_IMPORT and target != own and target not in MAY_IMPORT[own]:
                upward.append(show(path, line, f"{own} may not import {target}"))
    assert not upward, "\n".join(upward)


def test_ray_is_known_to_deployments_only() -> None:
    found = [
        show(path, line, f"imports {name}")
        for path in product_files()
        if layer(path) != "deployments"
        for line, name in imported_modules(path)
        if name.partition(".")[0] == "ray"
    ]
    assert not found, "\n".join(found)


def test_http_frameworks_are_known_to_deployments_only() -> None:
    http = {"fastapi", "starlette", "uvicorn", "aiohttp", "httpx"}
    found = [
        show(path, line, f"imports {name}")
        for path in product_files()
        if layer(path) != "deployments"
        for line, name in imported_modules(path)
        if name.partition(".")[0] in http
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_top_folders_are_no_packages_themselves(folder: str) -> None:
    # A bare top-level package named `kernels` is taken by transformers for the PyPI package of that name.
    assert not (REPOSITORY / folder / "__init__.py").exists()


def test_sub_folders_are_packages_and_the_wheel_lists_them_all() -> None:
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    holding_code = {path.parent.relative_to(REPOSITORY) for path in product_files()}
    expected = {".".join(("shoal", *folder.parts)) for folder in holding_code}
    expected |= {f"shoal.{folder}" for folder in MAY_IMPORT}
    assert expected - set(config["packages"]) == set(), "missing in [tool.setuptools] packages"
    without_init = [
        str(folder)
        for folder in holding_code
        if len(folder.parts) > 1 and not (REPOSITORY / folder / "__init__.py").is_file()
    ]
    assert not without_init, f"no __init__.py in {without_init}"
    for name in config["packages"]:
        folder = REPOSITORY.joinpath(*name.split(".")[1:])
        assert folder.is_dir(), f"{name} is listed in pyproject.toml but {folder.name}/ does not exist"


DISTRIBUTIONS = {"zmq": "pyzmq", "yaml": "pyyaml"}
"""Import name -> name of the distribution, where they differ."""


def declared(requirements: list[str]) -> set[str]:
    names = (re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements)
    return {name.lower().replace("-", "_") for name in names}


def third_party(paths: list[Path]) -> set[str]:
    roots = {name.partition(".")[0] for path in paths for _, name in imported_modules(path)}
    known = {"shoal", "tests", *sys.stdlib_module_names}
    return {DISTRIBUTIONS.get(root, root).lower() for root in roots - known if root}


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    always, extras = declared(project["dependencies"]), project["optional-dependencies"]
    imported = third_party(product_files())
    assert imported - always == declared(extras["gpu"] + extras["plot"]), "imported, but not declared"
    assert always - imported == set(), "declared, but imported nowhere"


def test_what_tests_import_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    everything = declared(project["dependencies"] + [r for extra in ("dev", "gpu", "clients") for r in extras[extra]])
    tests = tracked("tests/*.py")
    own_helpers = {path.stem for path in tests}
    assert third_party(tests) - own_helpers - everything == set()


def test_data_files_of_packages_are_in_the_wheel() -> None:
    """Every file beside the code that is no Python must match a package-data pattern, or the wheel lacks it."""
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    missing = []
    for path in tracked(*MAY_IMPORT):
        if path.suffix == ".py" or layer(path) not in MAY_IMPORT:
            continue
        relative = path.relative_to(REPOSITORY)
        owners = [(".".join(("shoal", *folder.parts)), folder) for folder in relative.parents if folder.parts]
        patterns = [(folder, glob) for name, folder in owners for glob in config["package-data"].get(name, [])]
        if not any(relative.relative_to(folder).match(glob) for folder, glob in patterns):
            missing.append(str(relative))
    assert not missing, f"not in [tool.setuptools.package-data]: {missing}"


def test_files_stay_short() -> None:
    long = []
    for path in tracked("*.py", "*.cpp", "*.h"):
        lines = path.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            long.append(show(path, 1, f"{lines} lines; what are its two parts?"))
    assert not long, "\n".join(long)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def line_limit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    return MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES


def test_functions_stay_short() -> None:
    long = [
        show(path, node.lineno, f"{node.name}: {code_lines(node)} lines")
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > line_limit(node)
    ]
    assert not long, "\n".join(long)


def test_no_machine_of_ours_is_named() -> None:
    """No absolute path of a developer's machine and no host of a package registry: both differ elsewhere."""
    hosts = [re.escape(".".join(parts)) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]
    homes = ["/" + "work/", "/" + "root/", "/" + r"home/\w", "/" + r"tmp/(?!ray\b)\w"]
    pattern = re.compile("|".join([*hosts, *(rf"(?<![\w.])(?:{home})" for home in homes)]))
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            show(path, number, line.strip()[:100])
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found, "\n".join(found)
