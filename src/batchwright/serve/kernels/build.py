"""Compiles the C++ files of this folder on first use, for the CPU that it runs on, into the user's cache.

A compiler is optional: where there is none, or it fails, or BATCHWRIGHT_KERNELS is "off", `library` is None,
`why_not` says why, and torch's own operators take the kernels' place. A library is named after everything that went
into it (sources, compiler, flags, CPU), so a changed one is built anew and an old one is never loaded. Only a cache
folder that nobody else can write to is used; without one, a library lives as long as its process.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

SWITCH = "BATCHWRIGHT_KERNELS"
_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-w")
_LONGEST = 300  # seconds, of a compilation


class Built(NamedTuple):
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    why_not: str


@cache
def built() -> Built:
    """Compiled and loaded once per process; from the cache, if it was built before."""
    if os.name != "posix":
        return Built(None, "they are built on POSIX systems only")
    if os.environ.get(SWITCH, "").lower() == "off":
        return Built(None, f"{SWITCH} is off")
    compiler = _compiler()
    if compiler is None:
        return Built(None, f"there is no C++ compiler ({', '.join(_COMPILERS)}, or the one that CXX names)")
    try:
        return Built(ctypes.CDLL(str(compiled(compiler, _native_flag()))), "")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        return Built(None, f"{compiler} could not build them: {error} {said[-500:]}".strip())


def loaded() -> bool:
    """Whether they are there because somebody asked for them; asks for nothing itself."""
    return built.cache_info().currsize > 0 and built().library is not None


def compiled(compiler: str, target: str) -> Path:
    """The library for `target`, a flag that names a CPU. Raises OSError and subprocess.SubprocessError."""
    files = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    folder = _folder()
    path = folder / f"kernels-{_fingerprint(files, compiler, target)}.so"
    if path.exists():
        return path
    handle, partial = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        sources = [str(file) for file in files if file.suffix == ".cpp"]
        command = [compiler, *_FLAGS, target, *sources, "-o", partial]
        subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=_LONGEST)  # noqa: S603 - ours
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return path


def cpu_features() -> frozenset[str]:
    """What the CPU can do, by the kernel's names for it; empty where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split()[2:])


def _compiler() -> str | None:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def _native_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _fingerprint(files: list[Path], compiler: str, target: str) -> str:
    said = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_LONGEST).stdout  # noqa: S603
    machine = " ".join([platform.machine(), platform.processor(), *(sorted(cpu_features()) or [platform.node()])])
    parts = [*(file.read_bytes() for file in files), said, " ".join((*_FLAGS, target, machine)).encode()]
    return sha256(b"\0".join(parts)).hexdigest()[:24]


@cache
def _folder() -> Path:
    """A folder that only this user can write to; a temporary one if the cache is no such place."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "batchwright" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if os.access(folder, os.W_OK) and all(_is_private(path) for path in (folder, folder.parent)):
            return folder
    except (OSError, RuntimeError):
        pass
    temporary = tempfile.TemporaryDirectory(prefix="batchwright-")
    _TEMPORARY.append(temporary)
    return Path(temporary.name)


def _is_private(path: Path) -> bool:
    state = path.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []
