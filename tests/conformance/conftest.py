"""Options and fixtures of the suite, and the rule that a run without any transport is a failed run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from moefleet import EpLayout
from tests.conformance.pool import MOST_RANKS, shared_pool
from tests.conformance.ranks import Ranks
from tests.conformance.transports import Transport, chosen

HERE = Path(__file__).parent
CARRIED = pytest.StashKey[set]()
"""Names of the transports that carried something in this run."""
SELECTED = pytest.StashKey[int]()
"""How many tests of this suite the run selected."""


chosen_here = cache(chosen)
"""What a run asks for each of its tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--transports", help="transports to test, by name, separated by commas (default: all available)")
    group.addoption("--device", default="cpu", help="where the tests' tensors live: cpu or cuda")
    group.addoption("--ranks", type=int, help=f"the most ranks of a test (default: {MOST_RANKS}, or what GPUs allow)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # These options exist only where the command line named this folder; elsewhere the defaults hold.
    if "transport" in metafunc.fixturenames:
        option = metafunc.config.getoption("--transports", None)
        found, left_out = chosen_here(option, metafunc.config.getoption("--device", "cpu"))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        nothing = pytest.param(None, id="none", marks=pytest.mark.skip(f"no transport is available here: {reasons}"))
        metafunc.parametrize(
            "transport", [pytest.param(each, id=each.name) for each in found] or [nothing], scope="session"
        )
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("--device", "cpu")


@pytest.fixture(scope="session")
def ranks(transport: Transport, device: str, pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Ranks over the transport under test. Their results are small, and threads only slow comparing them down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    most = most_ranks(pytestconfig, transport)
    yield Ranks(shared_pool(), transport, device, pytestconfig.stash.setdefault(CARRIED, set()), most)
    torch.set_num_threads(threads)


def most_ranks(config: pytest.Config, transport: Transport) -> int:
    option = config.getoption("--ranks", None)
    most = transport.most_ranks(config.getoption("--device", "cpu"))
    return most if option is None else min(most, option)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say where tests ran with fewer ranks than they have elsewhere."""
    device = config.getoption("--device", "cpu")
    with contextlib.suppress(LookupError):  # collecting has told already
        for transport in chosen(config.getoption("--transports", None), device)[0]:
            if (most := most_ranks(config, transport)) < MOST_RANKS:
                terminalreporter.write_line(
                    f"conformance: {transport.name} on {device} had at most {most} ranks here: tests of any number of "
                    "ranks ran with so many, those of a larger number were skipped"
                )


def pytest_collection_finish(session: pytest.Session) -> None:
    ours = [
        item for item in session.items if HERE in item.path.parents and "ranks" in getattr(item, "fixturenames", ())
    ]
    session.config.stash[SELECTED] = len(ours)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    selected, carried = config.stash.get(SELECTED, 0), config.stash.get(CARRIED, set())
    if (
        selected
        and not carried
        and not config.option.collectonly
        and exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(
                f"conformance: {selected} tests were selected and no transport carried anything: that is a failure",
                red=True,
            )
