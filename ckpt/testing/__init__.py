"""Tests of the guarantees that every store must keep, for authors of stores.

    # test_my_store.py
    from ckpt.testing import StoreTests
    from my_package import MyStore

    class TestMyStore(StoreTests):
        has_unfinished = True

        @pytest.fixture(autouse=True)
        def place(self, tmp_path):
            self.url = f"my://{tmp_path}"

        def make(self):
            return MyStore(self.url, writable=True)

The tests use only the interface `ckpt.store.Store`, so a store that passes them can store checkpoints. Listings may
have any order, because the tests sort them. Needs pytest.

`in_virtual_time` is for tests of code that waits: retries, limits, deadlines.
"""

from ckpt.testing.large_objects import LargeObjectTests, RangeTests
from ckpt.testing.over_stores import BLOB as BLOB
from ckpt.testing.over_stores import keys as keys
from ckpt.testing.over_stores import pieces as pieces
from ckpt.testing.over_stores import upload as upload
from ckpt.testing.small_objects import ListingTests, SmallObjectTests
from ckpt.testing.virtual_time import in_virtual_time as in_virtual_time

__all__ = ["StoreTests", "in_virtual_time"]


class StoreTests(SmallObjectTests, ListingTests, LargeObjectTests, RangeTests):
    """Subclass this class, and define `make`. Each test uses one location, which must be empty at its start."""
