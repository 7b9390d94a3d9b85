# SPDX-License-Identifier: Apache-2.0
"""Some random decoders; `make fuzz` runs more."""

from tests.fuzz.campaign import Campaign
from tests.fuzz.conftest import Workers
from tests.fuzz.decoders import oracle as decoders
from tests.fuzz.decoders.runs import Turn

CASES, SEED = 20, 20


def test_random_decoders_give_no_finding(workers: Workers) -> None:
    found: list[str] = []
    oracle = decoders.DecoderOracle(*workers)
    campaign = Campaign(decoders.cases(), oracle.judge, lambda _, finding: found.append(finding.text))
    campaign.run(CASES, SEED)
    assert not found
    assert campaign.counts["same"] > CASES * 3 / 4


def test_lost_key_is_found(workers: Workers) -> None:
    """The oracle must notice one token missing from a past, the smallest mistake of a KV cache."""
    reference, _ = workers
    oracle = decoders.DecoderOracle(*workers)
    tried = (decoders.build(bytes([i]) * decoders.BYTES, ("generic",)) for i in range(256))
    cases = [case for case in tried if len(case.lengths) == 1 and len(case.steps) > 1 and case.steps[1].past > 1]
    for case in cases[:5]:
        first, second = case.steps[:2]
        exact, rounded = oracle.references(case)
        shorter = Turn(second.ids, second.mask[:, 1:], second.past - 1)
        wrong = reference.call(decoders.RUN, case.decoder, [first, shorter], case.capacity)
        assert oracle.compare(case, exact, rounded, exact).finding is None
        assert oracle.compare(case, exact, rounded, wrong).finding is not None
