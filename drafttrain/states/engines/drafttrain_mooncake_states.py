"""vLLM's connector of hidden states into a Mooncake store. vLLM's process imports this file;
drafttrain is not needed there.

The connector of hs-connectors 0.9 writes the states of a row as one object and names it in the
reply. Clients have no folder that could hold a record of what is served, so each reply carries the
record too.
"""

from __future__ import annotations

from typing import Any

import torch
from drafttrain_address import own_address
from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector


class MooncakeStatesConnector(MooncakeHiddenStatesConnector):
    """MooncakeHiddenStatesConnector whose replies carry the server's record; it also runs without
    an accelerator.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._record = self._kv_transfer_config.get_from_extra_config("record", None)
        # Known here only: the worker that writes may be on another machine than the command that
        # started the server.
        self._store.config.local_hostname = own_address(self._store.config.master_server_address)

    def _device(self) -> Any:
        if torch.accelerator.is_available():
            return super()._device()
        from drafttrain_cpu_states import CpuDevice

        return CpuDevice

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        delayed, manifest = super().request_finished(request, block_ids)
        return delayed, {**(manifest or {}), "record": self._record}
