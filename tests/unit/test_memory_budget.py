"""How much memory may be taken, and what a run takes."""

import pytest

from paceline.core.errors import UserError
from paceline.core.machine_limits import available_bytes, granted_cores
from paceline.model import memory_budget as available_memory
from paceline.model.mass_optimizer import OptimizerSpec
from paceline.model.memory_budget import region_shortage, require_region, require_server, server_bytes
from paceline.model.regions import RegionLayout
from paceline.model.spec import ModelSpec

GIB = 1 << 30


def system(root, files):
    """A file system with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def spec(optimizer="SGD", dtype="torch.float32", **options):
    return ModelSpec(
        (("w", (1000, 1024), dtype),), (), OptimizerSpec(optimizer, ({"lr": 0.1, **options},), ((0,),)), ()
    )


MEMINFO = "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n"


def test_without_limits_the_machine_decides(tmp_path):
    assert available_bytes(system(tmp_path, {"proc/meminfo": MEMINFO})) == 4 * GIB


def test_where_nobody_can_say_it_is_unknown(tmp_path):
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some():
    assert available_bytes() > 0


def test_a_limit_of_the_second_version_of_groups_counts(tmp_path):
    root = system(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/user/run\n",
        "sys/fs/cgroup/user/run/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/run/memory.current": f"{2 * GIB}\n",
        "sys/fs/cgroup/user/run/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
    })  # fmt: skip
    assert available_bytes(root) == GIB + GIB // 2


def test_a_tighter_limit_above_counts(tmp_path):
    root = system(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/user/run\n",
        "sys/fs/cgroup/user/run/memory.max": "max\n",
        "sys/fs/cgroup/user/run/memory.current": "5\n",
        "sys/fs/cgroup/user/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{GIB}\n",
    })  # fmt: skip
    assert available_bytes(root) == GIB


def test_a_limit_of_the_first_version_of_groups_counts(tmp_path):
    root = system(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",  # a container sees its own group as the root
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100\n",
    })  # fmt: skip
    assert available_bytes(root) == GIB // 2 + 100


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    root = system(tmp_path, {
        "proc/self/cgroup": "0::/../outside\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "900\n",
    })  # fmt: skip
    assert available_bytes(root) == 0


@pytest.mark.parametrize(
    ("made", "tensors"),
    [
        (spec(), 2),
        (spec(momentum=0.9), 3),
        (spec("Adam", amsgrad=False), 4),
        (spec("AdamW", amsgrad=True), 5),
        (spec("RMSprop", centered=True, momentum=0.5), 5),
        (spec("Adam", "torch.bfloat16"), 4),  # masters have single precision
    ],
)
def test_the_server_takes_weights_optimizer_state_and_a_gradient(made, tensors):
    assert server_bytes(made) == tensors * 1000 * 1024 * 4
    assert server_bytes(made, mirrors=3) == tensors * 1000 * 1024 * 4 + 3 * RegionLayout(made).nbytes


def test_errors_name_need_and_rest(monkeypatch):
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"needs 0.0114 GiB of shared memory per worker .*, only 0.000977 GiB are avai"):
        require_region(spec())
    with pytest.raises(UserError, match=r"needs 0.0534 GiB of memory .* each of 4 workers.*fewer workers or a smaller"):
        require_server(spec(), regions=4)
    assert "the system refuses" in str(region_shortage(GIB, None))


@pytest.mark.parametrize("available", [None, 1 << 40])
def test_enough_is_no_error(monkeypatch, available):
    monkeypatch.setattr(available_memory, "available_bytes", lambda: available)
    require_region(spec())
    require_server(spec(), regions=4, mirrors=4)


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
                "sys/fs/cgroup/cpu.max": "50000 100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_tightest_limit_of_processor_time_counts(tmp_path, files, granted):
    assert granted_cores(system(tmp_path, files)) == granted
