"""The command doctor: what this machine has, and what this means for speed and for the commands.

    examine(DoctorConfig(output=Path("runs")))    # {"checks": [{"name": "cores", "found": "2 of ...", ...}, ...]}

Nothing is changed, and the network is not used. For about a second, temporary files are written to test the disk. The
faster library for matrix products is not reported: commands measure that themselves (mlsm/common/matrix_products.py).
"""

import os
import platform
import shutil
import tempfile
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mlsm.common.errors import describe
from mlsm.common.invocation import program
from mlsm.common.machine import available_cores, available_memory, cpu_model
from mlsm.common.progress import silent
from mlsm.common.settings import check

BYTES_PER_TOKEN = 75  # of a store with 32 LSPs per token (docs/small-encoder.md)
WRITTEN, SECONDS = 2**28, 1.0  # limits of the disk test: bytes and seconds
INSTRUCTION_SETS = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Say what this machine has, and what that means for speed or for what can be done."""

    output: Path = Path("runs")
    """Directory whose disk is looked at: the --output of other commands. It need not exist, and is not made."""
    gpu: bool = False
    """Prove on the GPU what commands would use of it, in a few minutes: both solvers against the CPU's, bfloat16 and
    torch.compile against float32. Prints a table for an issue; the answers are kept."""

    def __post_init__(self):
        check(self)


def examine(settings: DoctorConfig, progress: Callable[..., None] = silent) -> dict:
    """Look at the machine.

    Returns  checks, a list of name, found (text), means (text), ok (False if something asks for action) and values;
             with --gpu also what prove_gpu (gpu.py) returns
    Raises   DeviceError with --gpu if there is no GPU
    """
    if settings.gpu:
        from mlsm.evaluation.inspection.gpu import prove_gpu

        return {"checks": list(_gpu()), **prove_gpu(progress)}
    return {"checks": [*_processor(), *_gpu(), *_software(), *_packages(), *_disk(settings.output)]}


def _check(name, found, means, ok=True, **values):
    return {"name": name, "found": found, "means": means, "ok": ok, "values": values}


def _processor():
    """Cores, memory, and the instructions used for matrix products."""
    import torch

    from mlsm.common.device import choose_device
    from mlsm.common.onednn import available, multiplies_bfloat16

    choose_device("cpu")  # keeps torch's threads to a quota
    threads = torch.get_num_threads()  # torch uses fewer if two logical cores share a physical one
    cores, memory = available_cores(), available_memory()
    is_limited, is_crowded = threads < cores and "OMP_NUM_THREADS" in os.environ, threads > cores
    found = f"{cores} of {cpu_model()}; matrix products use {threads}"
    means = "Encoding and training use them automatically; --workers N shares them among N processes."
    if is_limited:
        means = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} leaves some of them idle: unset it, or set it higher."
    elif is_crowded:
        means = f"More threads than cores wait for one another: unset OMP_NUM_THREADS, or set it to {cores}."
    is_fit = not (is_limited or is_crowded)
    yield _check("cores", found, means, is_fit, cores=cores, threads=threads, model=cpu_model())
    means = "Every worker process loads its own teacher: 0.5 GB for BERT-base in float32, plus its batches."
    yield _check("memory", f"{memory / 1e9:.0f} GB", means, bytes=memory)
    list_capabilities: Callable[[], Any] = getattr(torch.cpu, "get_capabilities", dict)  # missing in torch 2.11
    sets = [name for name in INSTRUCTION_SETS if list_capabilities().get(name)]
    torch_uses = torch.backends.cpu.get_cpu_capability()
    found = (
        f"{'there' if available() else 'not usable'}; processor: {', '.join(sets) or 'not known'}; torch: {torch_uses}"
    )
    means = (
        "Commands time each matrix product once on this machine and use the faster library: oneDNN or torch's own."
        if available()
        else "Matrix products use only torch's own library, which is slower on some processors."
    )
    yield _check("oneDNN", found, means, available(), instruction_sets=sets, torch_uses=torch_uses)
    fast = multiplies_bfloat16()
    means = "The default on a CPU is float32; train-student --dtype bfloat16 " + (
        "is worth a try." if fast else "would not be faster."
    )
    yield _check("bfloat16", "multiplied by the processor" if fast else "emulated", means, fast=fast)


def _gpu():
    """The GPUs, and the solver that encodes on them."""
    import torch

    from mlsm.common.device import lack_of_code

    try:
        version = metadata.version("numba-cuda")
    except metadata.PackageNotFoundError:
        version = None
    if not torch.cuda.is_available():
        is_unused = torch.version.cuda is None and torch.version.hip is None and shutil.which("nvidia-smi") is not None
        found, means = (
            "none that torch sees",
            "CPU cores are enough for small teachers; encode-lsp --dry-run says how long a corpus takes here.",
        )
        if is_unused:
            found = "a GPU driver is installed, but this torch is built only for CPUs"
            means = "Install a torch built for CUDA (pytorch.org/get-started) to use the GPU."
        yield _check("GPU", found, means, not is_unused, devices=[])
        means = "It is only used on GPUs: not needed here."
        yield _check("numba-cuda", version or "not installed", means, version=version)
        return
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{device.name}, {device.total_memory / 1e9:.0f} GB" for device in devices]
    means = "Commands use the first one; --device cuda:1 uses another, and --workers N gives each process its own."
    lacking = [lack for index in range(len(devices)) if (lack := lack_of_code(index))]
    yield _check("GPU", "; ".join(names), "; ".join(lacking) or means, not lacking, devices=names)
    means = f"Solvers are tested on a GPU before they are used. {program()} doctor --gpu tests and times them now."
    if torch.version.hip:
        means = "Its kernels need an NVIDIA GPU: here plain torch encodes."
    elif version is None:
        means = (
            "Without it there are no CUDA kernels, and sparse coding uses plain torch. Install it:  pip install "
            '"mlsm-pretrain[gpu]"'
        )
    is_fine = version is not None or torch.version.hip is not None
    yield _check("numba-cuda", version or "not installed", means, is_fine, version=version)


def _software():
    """The build of faiss, and a browser."""
    try:
        import faiss
    except ModuleNotFoundError:
        means = 'This machine trains students. To encode and to show LSPs:  pip install "mlsm-pretrain[encode]"'
        yield _check("faiss", "not installed", means, version=None, gpu=False, packages=[])
    else:
        has_gpu = hasattr(faiss, "StandardGpuResources")
        found = f"{faiss.__version__}, {'GPU' if has_gpu else 'CPU'} build ({faiss.get_compile_options().strip()})"
        means = (
            "It initialises dictionaries (k-means) and finds similar LSPs: a small part of the time with either build."
        )
        owners = _owners_of_faiss()
        if len(owners) > 1:
            means = f"{' and '.join(owners)} own the same directory: uninstall both, then install one of them."
        yield _check("faiss", found, means, len(owners) < 2, version=faiss.__version__, gpu=has_gpu, packages=owners)
    try:
        name = getattr(webbrowser.get(), "name", "the system's own")
        means = "It opens the pages of show-lsp and compare from disk."
    except webbrowser.Error:
        name = None
        means = "The pages of show-lsp and compare are plain files: copy their directory to a machine with a browser."
    yield _check("browser", name or "none", means, browser=name)


def _packages():
    """Versions of Python and of the required packages, compared with the ranges that mlsm requires."""
    from packaging.requirements import Requirement  # installed with transformers

    try:
        stated = [Requirement(line) for line in metadata.requires("mlsm-pretrain") or []]
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        stated = []
    versions, wrong = {}, []
    for entry in stated:
        if entry.marker is not None and not entry.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = entry.name if entry.name != "faiss-cpu" else next(iter(_owners_of_faiss()), entry.name)
            versions[entry.name] = metadata.version(installed)  # faiss-gpu also satisfies the requirement
        except metadata.PackageNotFoundError:
            wrong.append(f"{entry.name} is missing")
            continue
        if not entry.specifier.contains(versions[entry.name], prereleases=True):
            wrong.append(f"{entry.name} {versions[entry.name]} is not {entry.specifier}")
    main = [f"{name} {versions[name]}" for name in ("torch", "transformers", "numpy", "numba") if name in versions]
    found = f"Python {platform.python_version()}, {', '.join(main)}" if main else f"Python {platform.python_version()}"
    if wrong:
        means = (
            f"Outside the version ranges of mlsm: {'; '.join(wrong)}. Fix it with:  pip install --upgrade mlsm-pretrain"
        )
    elif stated:
        means = f"All {len(versions)} required packages are within the version ranges of mlsm."
    else:
        means = (
            "mlsm itself is not installed here, so its version ranges are unknown. Install it with:  pip install "
            "--editable ."
        )
    yield _check("versions", found, means, bool(stated) and not wrong, packages=versions, wrong=wrong)


def _owners_of_faiss():
    """Installed packages whose files are in the directory faiss/: faiss-cpu, faiss-gpu and others."""
    return sorted({found.name for found in metadata.distributions() if (found.name or "").startswith("faiss-")})


def _disk(output):
    """Free space, speed and hard-link support of the disk on which `output` is, or would be."""
    place = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    means = f"Room for about {free / BYTES_PER_TOKEN / 1e9:,.1f} billion tokens, at {BYTES_PER_TOKEN} bytes each."
    yield _check("free disk", f"{free / 1e9:,.0f} GB at {place}", means, free > 1e9, bytes=free, directory=str(place))
    chunk, written = os.urandom(2**22), 0  # random bytes, so that no file system compresses them
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            began = time.perf_counter()
            while written < min(WRITTEN, free // 4) and time.perf_counter() - began < SECONDS:
                written += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())  # every time: otherwise a slow disk could need a minute at the end
            rate = written / (time.perf_counter() - began)
    except OSError as error:
        means = "Nothing can be written there. Choose an --output directory that is writable and has free space."
        yield _check("disk speed", describe(error), means, False, bytes_per_second=None)
        return
    means = "Fast enough: encoding on a few cores writes about 1 MB/s."
    if rate < 1e7:
        means = (
            "Slow: several encoding processes may have to wait for it. Choose an --output directory on a local disk."
        )
    yield _check(
        "disk speed",
        f"about {rate / 1e6:,.0f} MB/s, synced, timed once for a second",
        means,
        rate >= 1e7,
        bytes_per_second=rate,
    )
    trouble = None
    with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as directory:
        try:
            Path(directory, "a").touch()
            os.link(Path(directory, "a"), Path(directory, "b"))
        except OSError as error:
            trouble = describe(error)
    means = (
        "Stores can be written here."
        if trouble is None
        else "Stores need them: choose an --output directory elsewhere."
    )
    yield _check("hard links", trouble or "there", means, trouble is None, trouble=trouble)
