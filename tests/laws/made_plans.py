"""Plans by hypothesis, so that a cluster on which a law is broken shrinks to a small one."""

from hypothesis import strategies as st

from paceline.laws.clusters import (
    BYTES,
    EPOCHS,
    JITTERS,
    KINDS,
    NETWORKS,
    REFUSED,
    SPEEDS,
    WORKS,
    ClusterPlan,
    scenario_text,
)


@st.composite
def plans(draw: st.DrawFn) -> ClusterPlan:
    """Any cluster of 1 to 9 workers with anything that may befall it."""
    speeds = draw(st.lists(st.sampled_from(SPEEDS), min_size=1, max_size=9))
    work = draw(st.sampled_from(WORKS))
    events = draw(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(KINDS), st.integers(0, 11)), max_size=10))
    size = draw(st.none() | st.integers(1, 40 * work))
    seed, jitter, network = draw(st.integers(0, 99)), draw(st.sampled_from(JITTERS)), draw(st.sampled_from(NETWORKS))
    return ClusterPlan(
        scenario=scenario_text(seed, jitter, network, speeds, events, work),
        work=work,
        seed=draw(st.integers(0, 99)),
        size=size,
        epochs=draw(st.sampled_from(EPOCHS)) if size else 1.0,
        refused=draw(st.sampled_from(REFUSED)),
        max_versions=draw(st.integers(1, 60)),
        model_bytes=draw(st.sampled_from(BYTES)),
    )
