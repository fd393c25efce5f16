"""Conformance tests of regions (``transport.region``): a class fed by a factory.

class TestMine(RegionConformance):
    def build(self, nbytes): return Exposed(...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from miraccl.errors import InvalidUsage, MiracclError, ProtocolError
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.region import Region, RegionProvider, RemoteRegion, Rights, StaleRegion
from tests.transport.conformance import pattern

NBYTES = 8192


@dataclass
class Exposed:
    """Region of one rank, as its owner and as a peer see it.

    Attributes:
        address: Address at which the owner accesses the memory.
        revoke: Ends the validity of ``remote``.
    """

    remote: RemoteRegion
    address: int
    revoke: Callable[[], None]


class RegionConformance:
    """Tests of the remote side, for every kind of region."""

    def build(self, nbytes: int) -> Exposed:
        raise NotImplementedError

    @pytest.fixture
    def exposed(self):
        exposed = self.build(NBYTES)
        yield exposed
        exposed.remote.close()

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (1, 4095), (4096, 4096), (8191, 1)])
    def test_put_is_visible_to_the_owner_and_get_returns_it(self, exposed, offset, nbytes):
        source, target = PrivateMemory(nbytes), PrivateMemory(nbytes)
        memory_at(source.address, nbytes)[:] = pattern(nbytes, offset)
        exposed.remote.put(offset, source.address, nbytes)
        exposed.remote.flush()
        assert memory_at(exposed.address + offset, nbytes) == pattern(nbytes, offset)
        exposed.remote.get(offset, target.address, nbytes)
        exposed.remote.flush()
        assert memory_at(target.address, nbytes) == pattern(nbytes, offset)

    def test_memory_outside_the_range_is_not_touched(self, exposed):
        source = PrivateMemory(100)
        memory_at(source.address, 100)[:] = b"\xff" * 100
        exposed.remote.put(500, source.address, 100)
        exposed.remote.flush()
        assert memory_at(exposed.address, 500) == bytes(500)
        assert memory_at(exposed.address + 600, NBYTES - 600) == bytes(NBYTES - 600)

    def test_empty_operations_are_allowed_anywhere(self, exposed):
        exposed.remote.put(0, 0, 0)
        exposed.remote.get(NBYTES, 0, 0)
        exposed.remote.flush()

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(-1, 1), (0, NBYTES + 1), (NBYTES, 1), (1, NBYTES), (0, -1)]
    )
    def test_operations_beyond_the_region_are_rejected(self, exposed, offset, nbytes):
        memory = PrivateMemory(2 * NBYTES)
        for operation in (exposed.remote.put, exposed.remote.get):
            with pytest.raises(InvalidUsage, match=f"the region has {NBYTES} bytes"):
                operation(offset, memory.address, nbytes)

    def test_a_revoked_region_is_stale(self, exposed):
        memory = PrivateMemory(8)
        exposed.remote.put(0, memory.address, 8)
        exposed.revoke()
        for operation in (exposed.remote.put, exposed.remote.get):
            with pytest.raises(StaleRegion):
                operation(0, memory.address, 8)

    def test_a_detached_region_is_stale(self, exposed):
        exposed.remote.close()
        exposed.remote.close()
        with pytest.raises(StaleRegion):
            exposed.remote.get(0, PrivateMemory(8).address, 8)


class ProviderConformance(RegionConformance):
    """Tests of providers that register and attach regions one by one."""

    provider: RegionProvider

    def build(self, nbytes: int) -> Exposed:
        region = self.provider.register(nbytes)
        return Exposed(self.provider.attach(region.descriptor()), region.address, region.revoke)

    @pytest.fixture
    def region(self):
        region: Region = self.provider.register(NBYTES)
        yield region
        region.close()

    @pytest.mark.parametrize("right", list(Rights))
    def test_a_descriptor_permits_its_rights_only(self, region, right):
        remote, memory = self.provider.attach(region.descriptor(right)), PrivateMemory(8)
        operations = {Rights.WRITE: remote.put, Rights.READ: remote.get}
        for needed, operation in operations.items():
            if needed is right:
                operation(0, memory.address, 8)
            else:
                with pytest.raises(InvalidUsage, match="does not permit"):
                    operation(0, memory.address, 8)

    def test_a_new_descriptor_is_valid_after_a_revocation(self, region):
        old = region.descriptor()
        region.revoke()
        with pytest.raises(StaleRegion):
            self.provider.attach(old)
        memory = PrivateMemory(8)
        self.provider.attach(region.descriptor()).get(0, memory.address, 8)

    def test_regions_are_kept_apart_by_their_keys(self, region):
        other = self.provider.register(NBYTES)
        memory = PrivateMemory(1)
        memory_at(memory.address, 1)[:] = b"x"
        self.provider.attach(other.descriptor()).put(0, memory.address, 1)
        assert bytes(memory_at(region.address, 1)) == b"\0"
        assert bytes(memory_at(other.address, 1)) == b"x"
        other.close()

    def test_malformed_descriptors_are_rejected(self, region):
        good = region.descriptor()
        for bad in (b"", b"{}", b"[]", b"\xff" * 20, good[:-4], good.replace(b"8192", b"4096")):
            with pytest.raises(MiracclError):
                self.provider.attach(bad)
        with pytest.raises(ProtocolError):
            self.provider.attach(b'["tape", "00", 0, 8, 3, {}]')

    def test_memory_stays_mapped_for_its_peer_after_close(self, region):
        remote = self.provider.attach(region.descriptor())
        region.close()
        region.close()
        with pytest.raises(StaleRegion):
            remote.get(0, PrivateMemory(8).address, 8)
        with pytest.raises(StaleRegion):
            region.descriptor()
