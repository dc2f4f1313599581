from __future__ import annotations

import pytest

from tests.resharding import jobs


@pytest.mark.multiprocess
@pytest.mark.parametrize("threshold", [0, 1 << 20])  # each copy a message; all of a peer in one
def test_two_updates_over_gloo_and_a_wrong_element_named_on_every_rank(ranks, threshold):
    ranks.run(2, jobs.exchange_twice_and_compare_ends, threshold=threshold)


@pytest.mark.multiprocess
def test_a_receiver_that_is_late_gets_what_was_sent(ranks):
    ranks.run(2, jobs.late_receiver)


@pytest.mark.multiprocess
def test_another_bucket_order_or_plan_on_one_rank_is_refused_before_the_first_send(ranks):
    ranks.run(2, jobs.wrong_bucket_order)


@pytest.mark.multiprocess
def test_trainer_and_engine_on_ranks_of_their_own_in_a_group(ranks):
    ranks.run(5, jobs.separate_trainer_and_engine, members=(1, 2, 3, 4))
