"""What benchmarks compute beside their measurements, against numbers worked by hand; and that the made-up actors still fit."""

# holds: exact

import math

import pytest

from benchmarks import rl_step, to_accuracy
from benchmarks.controller_scale import run, scaled
from benchmarks.engine import SMOLLM2, padded_step
from benchmarks.fakes import Seconds
from benchmarks.pages import spread, table
from benchmarks.prefix_trees import cases, ideal, tree_depths
from benchmarks.prefix_trees_recipe import training_ms
from rl.batching import pack, supervised_sample


def test_a_tree_holds_each_distinct_prefix_once():
    samples = [
        supervised_sample([1, 2], [3, 4]),
        supervised_sample([1, 2], [3, 5, 6]),
        supervised_sample([1], [2]),
    ]
    assert sorted(tree_depths(samples)) == [0, 1, 2, 3, 3, 4]  # 1, 12, 123, 1234, 1235, 12356
    assert tree_depths([samples[0], samples[0]]).tolist() == [0, 1, 2, 3]


def test_the_ideal_counts_the_tree_where_packing_declines_to_share():
    samples = cases()["1 x 8, 48 + 512"]()
    batch = pack(samples, max_tokens=4096, share_prefixes=True)
    assert batch.num_tokens == sum(map(len, samples)) == 8 * 560  # packed plainly
    assert len(tree_depths(samples)) == 48 + 8 * 512
    assert ideal(samples) == pytest.approx(1.06, abs=0.005)


def test_the_ideal_counts_a_tree_that_is_longer_than_a_row():
    """By hand: 6 FLOPs for each weight and token, 12 for each pair of tokens, layer and attention's width; the head is shared."""
    samples = cases()["1 x 8, 512 + 512"]()
    dim, width = SMOLLM2["hidden_size"], 9 * 64
    weights = 30 * (dim * 64 * 2 * (9 + 3) + 3 * dim * 1536)
    head = 6 * dim * 49152 * 8 * 512
    alone = 6 * weights * 8 * 1024 + 12 * 30 * width * 8 * (1024 * 1025 // 2) + head
    pairs = 512 * 513 // 2 + 8 * sum(range(513, 1025))
    tree = 6 * weights * (512 + 8 * 512) + 12 * 30 * width * pairs + head
    assert ideal(samples) == pytest.approx(alone / tree)


def test_padded_rows_have_one_mean_whatever_the_micro_batches(tmp_path):
    """Rows of 3 to 40 tokens, in one micro-batch, in four and in one each: the mean over all targets."""
    import torch
    import transformers

    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "head_dim": 32,
    }
    small |= {"num_attention_heads": 1, "num_key_value_heads": 1, "initializer_range": 0.5}
    own = {name: value for name, value in SMOLLM2.items() if name not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model("llama", **own | small)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    samples = [supervised_sample([1, 2], [3 + i] * (1 + 5 * i)) for i in range(8)]
    losses = [padded_step(tmp_path, max_tokens)(samples) for max_tokens in (0, 2 * 38, 38)]
    assert losses == pytest.approx([losses[0]] * 3, rel=2e-3)  # holds: meaning, means of means are 4% off


def test_training_is_compared_by_the_tokens_that_there_are_without_sharing():
    steps = [
        {"time/train": 2.0, "tokens/computed_unshared": 1000},
        {"time/train": 4.0, "tokens/computed_unshared": 2000},
    ]
    assert training_ms(steps) == 2.0


def test_the_controllers_benchmark_runs_with_everything_that_a_run_has():
    settings = scaled(num_tokens=16, prompts_per_step=4, steps=2, num_generators=2)
    cpu, virtual = run(settings, Seconds(group=3.0, train=5.0, publish=0.1, load=0.3), num_rewards=1)
    assert (
        cpu > 0 and 2 * 5.0 < virtual < 2 * (3.0 + 5.0 + 0.1 + 0.3) + 5
    )  # holds: exact, a clock that is made up


def test_equal_work_leaves_out_no_sample_and_shares_no_prefix():
    task, equal = rl_step.task(), rl_step.equal_work()
    assert task.algorithm.drops_zero_advantages and task.trainer.share_prefixes
    assert not equal.algorithm.drops_zero_advantages and not equal.trainer.share_prefixes


def step(seconds, **numbers):
    return (
        dict.fromkeys(("generate", "sync", "train", "sampled", "samples"), 1.0)
        | {"seconds": seconds}
        | numbers
    )


def test_both_ratios_stand_beside_trls_seconds_and_padding_is_what_is_no_token():
    ours = {"without_advantage": 40.0, "positions": 700.0, "tokens": 2500.0}
    theirs = {"without_advantage": 60.0, "positions": 9000.0, "tokens": 6000.0, "forward": 3.0}
    steps = {
        "ours, synchronous": [step(s, **ours) for s in (9.0, 10.0, 30.0)],
        rl_step.EQUAL: [step(20.0, **ours | {"positions": 2500.0})],
        "TRL": [step(s, **theirs) for s in (50.0, 60.0, 60.0)],
    }
    header, own, equal, trl = rl_step.seconds_table(steps)
    at = {name: i for i, name in enumerate(header)}
    assert own[at["s/step"]] == "10.00 (9.00 to 30.00)" and own[at["ours is faster by"]] == ""
    assert (
        trl[at["ours is faster by"]] == "6.0"
        and trl[at["with equal work"]] == "3.0"
        and trl[at["forward"]] == "3.00"
    )
    assert own[at["forward"]] == "" and equal[at["with equal work"]] == ""
    _, own, equal, trl = rl_step.work_table(steps)
    assert own[2:] == ["40", "24", "700", "0"] and equal[2:] == ["40", "64", "2,500", "0"]
    assert trl[2:] == ["60", "64", "9,000", "3,000"]


def test_a_curve_crosses_the_goal_between_two_evaluations():
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.5), (30.0, 0.3)]
    assert to_accuracy.crossing(curve, 0.45) == pytest.approx(15.0)
    assert to_accuracy.crossing(curve, 0.4) == pytest.approx(10.0)
    assert math.isnan(to_accuracy.crossing(curve, 0.6))
    assert to_accuracy.with_error([10.0, 20.0, 30.0]) == "20 +- 6"
    assert to_accuracy.ratio_with_error([90.0, 100.0, 110.0], [10.0, 10.0, 10.0]) == "10.0 +- 0.6"
    assert to_accuracy.with_error([10.0, math.nan, 30.0]) == "1 of 3 seeds never reach it"
    assert to_accuracy.ratio_with_error([90.0, 100.0, 110.0], [10.0, math.nan, 10.0]) == ""


def test_a_table_of_asynchrony_compares_within_rounds():
    from benchmarks.asynchrony import COMMANDS, PINNED, rows_of

    def steps(*seconds):
        return [{"time/step": s, "time/sync_blocking": 0.1 * s} for s in seconds]

    plain, drain, in_flight = COMMANDS
    pinned, pinned_drain = PINNED
    seconds = {plain: (10, 12), drain: (8, 8), in_flight: (10, 10), pinned: (20, 20), pinned_drain: (10, 16)}
    rows = rows_of({name: [steps(a), steps(b, b)] for name, (a, b) in seconds.items()})
    assert [row[1:3] for row in rows[2:]] == [
        ["8.00 (8.00 to 8.00)", "1.38 (1.25 to 1.50)"],
        ["10.00 (10.00 to 10.00)", "1.10 (1.00 to 1.20)"],
        ["20.00 (20.00 to 20.00)", "1.00 (1.00 to 1.00)"],
        ["13.00 (10.00 to 16.00)", "1.62 (1.25 to 2.00)"],
    ]
    assert {row[-1] for row in rows[1:]} == {"10.0%"}


def test_a_spread_is_the_median_with_the_least_and_the_most():
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)" and spread([1.5], 1) == "1.5"
    assert table([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
