"""What the compiler made of the inner loops of the products: no sum may be spilled, and there is one copy of each loop.

A spilled sum costs a store, a load and their latency in every step of K, two thirds of the speed, and which of several
inlined copies gets one is chance. So the loops live in functions of their own, and this reads their machine code: for
this CPU and, compiled only, for one with AVX-512.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.kernels.cpu.build import FLAGS, SOURCES, find_compiler

PRODUCTS = re.compile(r"vfmadd\w*ps|vpmadd\w+")
STACK_STORE = re.compile(r"%[xyz]mm\d+,[^,]*\(%rsp")
FRAME_STORE = re.compile(r"%[xyz]mm\d+,[^,]*\(%rbp")


@dataclass(frozen=True)
class Loop:
    """An innermost loop that multiplies: the function it is in, and its instructions as objdump prints them."""

    function: str
    instructions: list[str]
    frame_pointer: bool

    @property
    def products(self) -> int:
        return sum(PRODUCTS.match(text) is not None for text in self.instructions)

    @property
    def spills(self) -> list[str]:
        stores = STACK_STORE.search, FRAME_STORE.search if self.frame_pointer else lambda _: None
        return [text for text in self.instructions if any(search(text) for search in stores)]


def loops(assembly: str) -> list[Loop]:
    """Of the disassembly of an object file; a loop is what a jump backwards encloses."""
    found: list[Loop] = []
    for part in re.split(r"^[0-9a-f]+ <(?=.*>:$)", assembly, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(">:\n")
        lines = re.findall(r"^\s*([0-9a-f]+):\s+(\S.*?)\s*$", body, flags=re.MULTILINE)
        at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        texts = [text for _, text in lines]
        spans = set()
        for i, text in enumerate(texts):
            jump = re.match(r"j\w+\s+([0-9a-f]+)", text)
            if jump is not None and (start := at.get(int(jump[1], 16), i + 1)) <= i:
                spans.add((start, i))
        multiplying = [(a, b) for a, b in spans if any(PRODUCTS.match(text) for text in texts[a : b + 1])]
        frame_pointer = any(re.match(r"mov\s+%rsp,%rbp", text) for text in texts)
        for a, b in multiplying:
            if not any((c, d) != (a, b) and a <= c and d <= b for c, d in multiplying):
                found.append(Loop(name, texts[a : b + 1], frame_pointer))
    return found


@pytest.fixture(scope="module", params=["native", "skylake-avx512"])
def target(request: pytest.FixtureRequest, native_ops) -> str:
    if platform.machine() != "x86_64":
        pytest.skip("reads x86-64 machine code")
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed (Debian and Ubuntu: apt-get install binutils)")
    if request.param == "native" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the products have no inner loops worth reading on a CPU without AVX2")
    return str(request.param)


def loops_of(source: str, target: str, folder: Path) -> list[Loop]:
    compiled = folder / f"{source}.o"
    command = [find_compiler(), *FLAGS, f"-march={target}", "-c", str(SOURCES / source), "-o", str(compiled)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    objdump = ["objdump", "-d", "-C", "--no-show-raw-insn", "-w", str(compiled)]
    return loops(subprocess.run(objdump, check=True, capture_output=True, text=True).stdout)


def rows_of_largest_tile(target: str) -> int:
    wide = target != "native" or "avx512f" in Path("/proc/cpuinfo").read_text()
    return 12 if wide else 6


def test_dense_products_keep_their_sums_in_registers(target, tmp_path) -> None:
    tiles: dict[tuple[str, int, int], Loop] = {}
    for loop in loops_of("linear.cpp", target, tmp_path):
        name = re.search(r"shoal::multiply<(float|unsigned short), (\d+), (\d+)>", loop.function)
        assert name is not None, f"a second copy of the inner loop, in {loop.function}"
        key = (name[1], int(name[2]), int(name[3]))
        assert key not in tiles, f"two loops in {loop.function}"
        tiles[key] = loop
    rows = range(1, rows_of_largest_tile(target) + 1)
    assert {(w, r, 1) for w in ("float", "unsigned short") for r in rows} <= tiles.keys()
    for (_, row_count, panels), loop in tiles.items():
        assert loop.products % (2 * row_count * panels) == 0, loop  # every product of a step of K is in the loop
        assert loop.spills == [], loop


def test_quantized_products_keep_their_sums_in_registers(target, tmp_path) -> None:
    """They keep no copy of the sums of all groups either; a constant may be read from the stack."""
    tiles: set[tuple[str, str]] = set()
    for loop in loops_of("quantized.cpp", target, tmp_path):
        if not any(text.startswith("vpmadd") for text in loop.instructions):
            continue  # quantizing and widening
        name = re.search(r"shoal::multiply_quantized<(\d), (\d+)>", loop.function)
        assert name is not None, f"a second copy of the inner loop, in {loop.function}"
        tiles.add((name[1], name[2]))
        assert loop.spills == [], loop
    assert tiles >= {(form, str(rows)) for form in "012" for rows in range(1, 5)}


def test_a_spill_is_recognized() -> None:
    assembly = """
0000000000000000 <f(float*)>:
   0:\tmov    %rsp,%rbp
   4:\tvmovaps %ymm1,0x20(%rsp)
   8:\tvfmadd231ps %ymm0,%ymm1,%ymm2
   c:\tvmovaps %ymm2,-0x40(%rbp)
  10:\tvmovaps 0x20(%rsp),%ymm3
  14:\tjne    8 <f(float*)+0x8>
  18:\tret
"""
    (loop,) = loops(assembly)
    assert (loop.function, loop.products) == ("f(float*)", 1)
    assert loop.spills == ["vmovaps %ymm2,-0x40(%rbp)"]
