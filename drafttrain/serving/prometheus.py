"""Figures of a running command, as a page that Prometheus reads (package prometheus_client)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from drafttrain.errors import UserError, reason_of
from drafttrain.extras import require

if TYPE_CHECKING:
    from prometheus_client import Metric

_PREFIX = "drafttrain_"


class FiguresPage:
    """Serves http://ADDRESS/metrics from a thread until it is closed.

    Args:
        address: PORT on this machine alone, or HOST:PORT. figures: called for each request, in that
            thread: name -> value. A name that ends in _total is a counter, others are gauges.

    Raises:
        UserError: not an address, in use, or prometheus_client is missing.
    """

    def __init__(self, address: str, figures: Callable[[], Mapping[str, float]]):
        self._figures = figures
        self._client = require("prometheus_client", "--metrics")
        registry = self._client.CollectorRegistry()
        registry.register(self)
        host, _, port = address.rpartition(":")
        try:
            self._server, _ = self._client.start_http_server(
                int(port), host or "127.0.0.1", registry
            )
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(
                f"metrics={address!r} cannot be listened to ({reason_of(error)}); give PORT or HOST:PORT"
            ) from error

    def collect(self) -> Iterator[Metric]:
        """The figures of now, as prometheus_client asks for them."""
        for name, value in self._figures().items():
            kind = "gauge"
            if name.endswith("_total"):
                kind = "counter"
            # The ending is of the sample, not of the metric.
            family = _PREFIX + name.removesuffix("_total")
            metric = self._client.Metric(family, "see docs/how-to/adapt.md", kind)
            metric.add_sample(_PREFIX + name, {}, value)
            yield metric

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
