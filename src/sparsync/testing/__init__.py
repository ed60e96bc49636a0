"""The invariants of a scheme, for its author's tests: conservation, replicas, traffic, resume, edges and others.

A scheme that passes all of them works with every integration. They work with or without pytest:

    @pytest.mark.parametrize("invariant", sparsync.testing.INVARIANTS)
    def test_my_scheme(invariant):
        sparsync.testing.check(invariant, lambda: MyScheme(density=0.1))

`check_scheme(lambda: MyScheme(density=0.1))` checks all of them in one call. All ranks run in this process, one at a time.
"""

from sparsync.testing.invariants import INVARIANTS as INVARIANTS
from sparsync.testing.invariants import check as check
from sparsync.testing.invariants import check_scheme as check_scheme
from sparsync.testing.subject import SchemeUnderTest as SchemeUnderTest
