"""End of a communicator on GPU memory: the faults that ranks find only when all have finished."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from miraccl.diagnosis.error_codec import decode_error, encode_error
from miraccl.errors import MiracclError

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.runtime.gpu.kernel_faults import DeviceFaults

CLOSE_WAIT_S = 10.0


def exchange_findings(
    session: Session,
    faults: DeviceFaults,
    unreported: MiracclError | None,
    already_reported: bool,
) -> MiracclError | None:
    """Return the fault found at the end by this rank or another one; all ranks call it.

    The sender of an unmatched message learns of it here.
    """
    records: list[Any] = []
    with contextlib.suppress(MiracclError):
        own = json.dumps(encode_error(unreported) if unreported is not None else None).encode()
        records = [json.loads(blob) for blob in session.all_gather(own, "gpu closed", CLOSE_WAIT_S)]
    if unreported is not None or already_reported or faults.reported:
        return unreported
    errors = (decode_error(record, rank=faults.rank, source=faults.rank) for record in records)
    return next((error for error in errors if error is not None), None)
