"""Cache of registrations: hits, bounds, eviction, invalidation; random histories."""

from __future__ import annotations

import random

import pytest

from miraccl.transport.verbs_registrations import Registration, RegistrationCache


class Pins:
    """Registered ranges, with a limit as of locked memory."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.ranges: dict[int, tuple[int, int]] = {}
        self.next = 0

    def register(self, address: int, nbytes: int) -> int:
        if sum(n for _, n in self.ranges.values()) + nbytes > self.limit:
            raise MemoryError
        self.next += 1
        self.ranges[self.next] = (address, nbytes)
        return self.next

    def deregister(self, handle: int) -> None:
        del self.ranges[handle]


def take(cache: RegistrationCache, address: int, nbytes: int) -> Registration:
    entry = cache.acquire(address, nbytes)
    assert entry is not None
    return entry


def test_released_ranges_stay_and_serve_parts():
    pins = Pins()
    cache = RegistrationCache(pins.register, pins.deregister)
    first = take(cache, 1000, 500)
    assert take(cache, 1100, 100) is first
    assert take(cache, 1400, 200) is not first
    cache.release(first)
    cache.release(first)
    assert take(cache, 1000, 10) is first
    assert (cache.hits, cache.misses) == (2, 2)
    cache.release(first)
    with pytest.raises(ValueError, match="without a user"):
        cache.release(first)


def test_bounds_evict_the_range_that_was_released_first():
    pins = Pins()
    cache = RegistrationCache(pins.register, pins.deregister, max_entries=3, max_bytes=300)
    entries = [take(cache, 1000 * i, 100) for i in range(3)]
    assert cache.acquire(9000, 1) is None  # all have users
    for i in (1, 0):
        cache.release(entries[i])
    assert take(cache, 9000, 100) is not None
    assert cache.find(1000, 100) is None
    assert cache.find(0, 100) is entries[0]
    assert cache.acquire(20_000, 301) is None
    assert cache.evictions == 1


def test_invalidated_range_ends_with_its_last_user():
    pins = Pins()
    cache = RegistrationCache(pins.register, pins.deregister)
    used, idle = take(cache, 0, 100), take(cache, 100, 100)
    cache.release(idle)
    assert not cache.invalidate(50, 100)  # touches both
    assert pins.ranges == {1: (0, 100)}
    assert cache.find(0, 100) is None
    other = take(cache, 0, 100)  # the memory was mapped anew
    assert other is not used
    cache.release(used)
    assert pins.ranges == {3: (0, 100)}
    cache.release(other)
    assert cache.invalidate(0, 1)
    assert not pins.ranges


def test_refused_registration_is_tried_again_without_idle_ones():
    pins = Pins(limit=250)
    cache = RegistrationCache(pins.register, pins.deregister)
    cache.release(take(cache, 0, 200))
    held = take(cache, 1000, 200)
    assert pins.ranges == {2: (1000, 200)}
    with pytest.raises(MemoryError):
        take(cache, 5000, 100)
    cache.release(held)
    cache.clear()
    assert not pins.ranges


@pytest.mark.parametrize("seed", range(5))
def test_random_histories(seed):
    rng = random.Random(seed)
    pins = Pins()
    cache = RegistrationCache(pins.register, pins.deregister, max_entries=6, max_bytes=5000)
    held: list[Registration] = []
    for _ in range(2000):
        address, nbytes = rng.randrange(0, 4000, 50), rng.randrange(50, 1500, 50)
        draw = rng.random()
        if draw < 0.5:
            entry = cache.acquire(address, nbytes)
            if entry:
                assert entry.valid
                assert entry.covers(address, nbytes)
                held.append(entry)
        elif draw < 0.9 and held:
            cache.release(held.pop(rng.randrange(len(held))))
        else:
            left = cache.invalidate(address, nbytes)
            assert left == (not any(e.touches(address, nbytes) for e in held))
            assert cache.find(address, nbytes) is None
        assert len(pins.ranges) <= 6
        assert sum(n for _, n in pins.ranges.values()) <= 5000
        # everything in use is registered
        assert {e.handle for e in held} <= pins.ranges.keys()
        assert {e.handle for e in cache} == pins.ranges.keys()
