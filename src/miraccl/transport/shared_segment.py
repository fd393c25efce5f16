"""Shared segment: an anonymous file that a process makes and peers of the host map.

It is opened by peers as ``/proc/<pid>/fd/<n>``, so it never has a name that could be left behind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from miraccl.errors import ProtocolError, SystemFailure
from miraccl.transport.mapped_file import MappedFile


@dataclass(kw_only=True)
class ShmSegment:
    """Mapped shared segment.

    Attributes:
        fd: Descriptor it was made with; -1 for a peer's segment and after ``release``.
    """

    file: MappedFile
    fd: int = -1

    @property
    def address(self) -> int:
        return self.file.address

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    @classmethod
    def create(cls, label: str, nbytes: int) -> ShmSegment:
        """Make and map a segment of zeros. Raises ``SystemFailure``."""
        fd = -1
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            return cls(file=MappedFile(fd, nbytes), fd=fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise SystemFailure(
                f"cannot make a shared segment of {nbytes} bytes: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, pid: int, fd: int, nbytes: int) -> ShmSegment:
        """Map the segment behind descriptor ``fd`` of process ``pid``.

        Raises:
            SystemFailure: The kernel refuses to open or map it.
            ProtocolError: Its size is not ``nbytes``.
        """
        try:
            handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SystemFailure(
                f"cannot open the segment of process {pid}: {error.strerror}",
                hint="give ranks that do not see each other's processes different MIRACCL_HOSTID",
            ) from error
        try:
            actual = os.fstat(handle).st_size
            if actual != nbytes:
                raise ProtocolError(
                    f"cannot map the segment of process {pid}: it has {actual} bytes instead of "
                    f"{nbytes}"
                )
            return cls(file=MappedFile(handle, nbytes))
        except OSError as error:
            raise SystemFailure(
                f"cannot map the segment of process {pid}: {error.strerror}"
            ) from error
        finally:
            os.close(handle)

    def release(self) -> None:
        """Close the descriptor, so that no further process can map the segment; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
