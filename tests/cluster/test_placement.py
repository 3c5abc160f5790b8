"""Who computes where, with how many threads."""

from rl.cluster.placement import Place, place

ROLES = {"trainer": 2, "generator": 2, "critic": 1, "reference": 1, "reward": 3}


def test_devices_are_dealt_out_in_order_and_rewards_get_none():
    places = place(ROLES, num_cores=12)
    assert {role: p.devices for role, p in places.items()} == {
        "trainer": (0, 1), "generator": (2, 3), "critic": (4,), "reference": (5,), "reward": (),
    }  # fmt: skip


def test_those_that_work_at_the_same_time_share_the_cores():
    threads = {role: p.num_threads for role, p in place(ROLES, num_cores=12).items()}
    assert threads == {"trainer": 4, "generator": 6, "critic": 4, "reference": 3, "reward": 1}
    at_once = {role: p.num_threads for role, p in place(ROLES, overlap=True, num_cores=12).items()}
    assert at_once == {"trainer": 2, "generator": 2, "critic": 2, "reference": 2, "reward": 1}


def test_what_is_asked_for_is_given_and_nobody_has_no_thread():
    assert place({"trainer": 1}, 2, {"trainer": 5})["trainer"] == Place(1, (0,), 5)
    assert place({"trainer": 8}, 2, {"trainer": 0})["trainer"].num_threads == 1
