"""The invariants of a scheme, for the tests of its author: conservation, replicas, traffic, resume, edges and others.

A scheme that passes all of them works behind every integration. pytest is not needed, and goes well with it:

    @pytest.mark.parametrize("invariant", sparsync.testing.INVARIANTS)
    def test_my_scheme(invariant):
        sparsync.testing.check(invariant, lambda: MyScheme(density=0.1))

`check_scheme(lambda: MyScheme(density=0.1))` checks all of them in one call. All ranks run in this process, one after the other.
"""

from sparsync.testing.invariants import INVARIANTS as INVARIANTS
from sparsync.testing.invariants import check as check
from sparsync.testing.invariants import check_scheme as check_scheme
from sparsync.testing.subject import SchemeUnderTest as SchemeUnderTest
