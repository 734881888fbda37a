"""A server that is asked a rollout ahead."""

from collections.abc import Iterator

import pytest

from tests.features.generate_ahead import tools as ahead
from tests.features.generate_ahead.tools import Watched
from tests.tools import engines
from tests.tools.engines import Server

engine, server, mixture = engines.engine, engines.server, engines.mixture


@pytest.fixture
def watched(server: Server) -> Iterator[Watched]:
    with ahead.connected():
        yield Watched(server)
