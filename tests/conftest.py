"""Fixtures that several parts of the suite share. No network, one text, one tiny teacher."""

import gc
import os
import shutil
import signal

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from own_signals import take_back_signals
from tiny_teacher import standard_text, tiny_teacher

from mlsm.common.signals import requests

take_back_signals()  # now: what is imported from here on may start processes

SLOWEST_FIRST = (  # 12 seconds each, or 40
    "test_trainer.py",
    "test_ranks.py",
    "test_interruption.py",
    "test_workers.py",
    "test_gpu_path.py",
    "test_study.py",
    "test_hidden_states.py",
    "test_nonneg_lasso.py",
    "test_pretraining.py",
    "test_torch_dataset.py",
    "test_compile.py",
    "test_proof.py",
    "test_fuzz.py",
    "test_imports.py",
    "test_frozen.py",
    "test_cli.py",
    "test_gpu_check.py",
    "test_display.py",
    "test_quarantine.py",
    "test_tutorials.py",
    "test_overlap.py",
    "test_mask_later.py",
    "test_export_run.py",
    "test_hostile_server.py",
    "test_compare.py",
    "test_centering.py",
)


def pytest_collection_modifyitems(items):
    """At the end short files are left, so that no process waits long for the last one of another."""
    places = {name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish():
    """What is imported and collected stays, so it is never again searched for garbage: a fifteenth of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_handlers():
    """A command that is run in this process leaves its handlers of signals; they are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    requests.forget()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """A cache of the session's own: what is measured or fetched here neither comes from the user's nor goes there."""
    os.environ["MLSM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts():
    """Nothing is forced to the disk, which takes minutes on some: whoever reads a file asks the same system for it.

    A number that is no open file is still an error. Tests in which a call fails or is counted replace it as usual.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def english_text(tmp_path_factory):
    """A text file of docstrings of standard modules, a document each."""
    return standard_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def teacher_directory(tmp_path_factory, english_text):
    """A random 3 x 32 BERT with a WordPiece tokenizer of 600 entries."""
    return tiny_teacher(tmp_path_factory.mktemp("teacher"), english_text)


@pytest.fixture(scope="module")
def forked_workers():
    """Dask's workers are forked from a process that has imported what they use, instead of importing it themselves.

    The workers of a command that runs in a process of its own are not: they start as a user's do, or faults/command.py
    forks them.
    """
    import dask
    from distributed.utils import get_mp_context

    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        used = ["distributed.nanny", "pipeline.encode", "transformers.models.bert.modeling_bert"]
        get_mp_context().set_forkserver_preload(used)
        yield


@pytest.fixture(scope="module")
def one_thread():
    """torch on one thread, in which sums always have one order, and tiny models are fastest."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def browser(open_browser):
    """A headless Chromium with an empty log. Skips the test if Chromium or its driver is not installed."""
    open_browser.get_log("browser")
    return open_browser


@pytest.fixture(scope="session")
def open_browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("no chromium and chromedriver are installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    yield driver
    driver.quit()
