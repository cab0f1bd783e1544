"""The tasks on tables: they reach what their plain references reach, on made data and on real."""

from pathlib import Path

import numpy as np
import pytest
from clusters import cluster, event
from without_tables import descended, factorized, regressed

import paceline
from paceline import tasks
from paceline.core.errors import DataError
from paceline.tasks import factorize, lasso, logreg, svmlight, topics

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
FOUR = cluster(1.0, 1.0, 0.5, 0.25, jitter="lognormal:0.2", network="latency_ms = 0.5")


def launch(task, scenario=FOUR, strategy="ssp:staleness=2", **settings):
    settings = {"evaluate_every": "10v", **settings}
    return paceline.launch(tasks.get(task), engine="sim", scenario=scenario, strategy=strategy, **settings)


def first_loss(task):
    return launch(task, options={"clocks": "1"}, evaluate_every="1v").summary.metrics["loss"]


class LoneSession:
    """A session on tables without a run; once the worker comes to clock `crash_at`, the tables return to clock 0."""

    data_dir = None

    def __init__(self, options, crash_at=None):
        self.options, self.crash_at = options, crash_at
        self.keys, self.tables, self.first, self.clocks = [], {}, {}, 0

    def option(self, name, default):
        return type(default)(self.options.get(name, default))

    def once(self, key, make):
        self.keys.append(key)
        return make()

    def table(self, name, rows, width, init, **_):
        self.first[name] = np.array(init() if callable(init) else init).reshape(rows, width)
        self.tables[name] = self.first[name].copy()
        return LoneTable(self, name)

    def measure(self, evaluate):
        pass

    def share(self, size):
        return np.arange(size)

    def clock(self, work):
        self.clocks += 1
        return True

    def crash_if_due(self):
        if self.clocks == self.crash_at:
            self.crash_at, self.clocks = None, 0
            self.tables = {name: values.copy() for name, values in self.first.items()}


class LoneTable:
    def __init__(self, session, name):
        self.session, self.name = session, name

    def get(self, rows):
        self.session.crash_if_due()
        return self.session.tables[self.name][rows].copy()

    def inc(self, rows, change):
        np.add.at(self.session.tables[self.name], rows, change)


class TestFactorize:
    @pytest.mark.slow
    def test_four_workers_come_as_far_as_one_process_on_as_many_ratings(self):
        ratings, held_out = factorize.split(factorize.make_ratings(1000, 200, 8, 40, 0))
        left, right = factorized(ratings, 8, 0.05, 0.01, 200, 4 * 300, 0)
        alone = factorize.objective(left, right, ratings, 0.01)
        run = launch("factorize")
        assert run.summary.metrics["loss"] < 1.15 * alone
        assert run.summary.metrics["loss"] < 0.5 * first_loss("factorize")
        tables = run.tables
        assert factorize.rmse(tables["users"], tables["items"], held_out) == pytest.approx(run.summary.metrics["rmse"])

    def test_a_gradient_is_that_of_the_objective(self):
        chance = np.random.default_rng(1)
        left, right, value = chance.normal(size=(5, 3)), chance.normal(size=(5, 3)), chance.normal(size=5)

        def loss(left, right):
            error = (left * right).sum(axis=1) - value
            return 0.5 * (error**2 + 0.1 * ((left**2).sum(axis=1) + (right**2).sum(axis=1))).sum()

        by_left, _ = factorize.gradient(left, right, value, 0.1)
        step = np.zeros_like(left)
        step[2, 1] = 1e-6
        assert (loss(left + step, right) - loss(left - step, right)) / 2e-6 == pytest.approx(by_left[2, 1], rel=1e-5)

    @pytest.mark.slow
    @needs_data
    def test_jester_is_read_whole(self):
        ratings = factorize.load_jester(DATA / "jester1")
        assert (ratings.users, ratings.items, len(ratings.user)) == (24_983, 100, 1_810_455)
        assert abs(float(ratings.value.mean())) < 1e-3
        assert (np.diff(ratings.user) >= 0).all()

    def test_ratings_of_another_rank_are_made_anew(self, monkeypatch):
        keys = []
        for rank in ("2", "3"):
            session = LoneSession({"rank": rank, "users": "20", "clocks": "1"})
            monkeypatch.setattr(paceline, "init", lambda session=session: session)
            factorize.train()
            keys += session.keys
        assert len(set(keys)) == 2

    def test_a_file_that_is_something_else_is_named(self, tmp_path):
        (tmp_path / factorize.JESTER).write_bytes(b"no archive")
        with pytest.raises(DataError, match="does not hold Jester's ratings"):
            factorize.load_jester(tmp_path)


class TestLasso:
    def test_one_worker_is_the_reference(self):
        run = launch("lasso", cluster(1.0), "bsp", options={"clocks": "60"})
        alone = descended(lasso.make(500, 1000, 0), 0.05, 20, 60)
        np.testing.assert_allclose(run.tables["weights"][:, 0], alone, atol=1e-12)

    @pytest.mark.slow
    def test_the_residual_is_what_the_weights_leave(self):
        run = launch("lasso")
        problem = lasso.make(500, 1000, 0)
        weights = run.tables["weights"][:, 0]
        np.testing.assert_allclose(run.tables["residual"][:, 0], problem.target - weights @ problem.columns, atol=1e-9)

    @pytest.mark.slow
    def test_four_workers_find_the_minimum(self):
        problem = lasso.make(500, 1000, 0)
        best = lasso.objective(problem, descended(problem, 0.05, 1000, 200), 0.05)
        assert launch("lasso").summary.metrics["loss"] < 1.02 * best

    @pytest.mark.slow
    @needs_data
    def test_a9a_has_no_empty_column_left(self):
        problem = lasso.load(DATA / "libsvm")
        assert problem.samples == 32_561
        np.testing.assert_allclose((problem.columns**2).sum(axis=1), problem.samples)


class TestLogreg:
    @pytest.mark.slow
    def test_four_workers_come_as_far_as_one_process_on_as_many_examples(self):
        data, held_out = logreg.make(4000, 200, 0)
        weights = regressed(data, 0.1, 1e-4, 100, 4 * 200, 0)
        loss, _ = logreg.score(data, weights, 1e-4)
        run = launch("logreg")
        assert run.summary.metrics["loss"] < 1.05 * loss
        assert run.summary.metrics["accuracy"] > 0.75
        assert logreg.score(held_out, run.tables["weights"][:, 0], 1e-4)[1] == run.summary.metrics["accuracy"]

    def test_a_gradient_is_that_of_the_loss(self):
        data, _ = logreg.make(50, 12, 3)
        weights, known = np.random.default_rng(2).normal(size=12), np.arange(12)
        step = np.zeros(12)
        step[4] = 1e-6
        slope = (logreg.score(data, weights + step, 0.1)[0] - logreg.score(data, weights - step, 0.1)[0]) / 2e-6
        assert logreg.gradient(data, known, weights, 0.1)[4] == pytest.approx(slope, rel=1e-5)

    @pytest.mark.slow
    @needs_data
    def test_a9a_is_read_whole_and_learned(self):
        train, test = logreg.load(DATA / "libsvm")
        assert (train.rows, test.rows, train.features, test.features) == (32_561, 16_281, 123, 123)
        weights = regressed(train, 0.5, 1e-4, 500, 300, 0)
        assert logreg.score(test, weights, 1e-4)[1] > 0.84


class TestTopics:
    @pytest.mark.slow
    def test_four_workers_find_as_good_topics_as_one_process(self):
        corpus = topics.make_corpus(200, 500, 10, 100, 0)
        alone = topics.loss_of(topics.topics_alone(corpus, 10, 0.1, 0.05, 20, 0), 0.05)
        run = launch("topics")
        assert run.summary.metrics["loss"] == pytest.approx(alone, rel=0.03)
        assert run.summary.metrics["loss"] < 0.9 * topics.loss_of(
            topics.count_words(corpus.words, topics.first_assignment(corpus, 10, 0), 500, 10), 0.05
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("events", ["", event("crash", 6.0, worker=1), event("join", 5.0, speed=1.0)])
    def test_the_counts_are_those_of_the_assignments_whoever_comes_or_goes(self, events):
        scenario = cluster(1.0, 0.5, 0.8, events=events, jitter="lognormal:0.3")
        run = launch("topics", scenario, options={"clocks": "30"}, evaluate_every="off")
        corpus = topics.make_corpus(200, 500, 10, 100, 0)
        assigned = run.tables["assignments"].ravel()[: len(corpus.words)]
        assert assigned.min() >= 0
        assert assigned.max() < 10
        np.testing.assert_array_equal(run.tables["words"], topics.count_words(corpus.words, assigned, 500, 10))
        np.testing.assert_array_equal(run.tables["topics"][0], np.bincount(assigned, minlength=10))

    @pytest.mark.parametrize("crash_at", [1, 3, 4])
    def test_assignments_are_read_again_where_a_restored_server_begins_anew(self, monkeypatch, crash_at):
        options = {"topics": "3", "documents": "8", "vocabulary": "20", "clocks": "6"}
        session = LoneSession(options, crash_at)
        monkeypatch.setattr(paceline, "init", lambda: session)
        monkeypatch.setattr(topics, "sampler", lambda: topics._sample)
        topics.train()
        assert session.crash_at is None
        corpus = topics.make_corpus(8, 20, 3, 100, 0)
        assigned = session.tables["assignments"].ravel()[: len(corpus.words)]
        np.testing.assert_array_equal(session.tables["words"], topics.count_words(corpus.words, assigned, 20, 3))

    @pytest.mark.slow
    @needs_data
    def test_the_ap_corpus_is_read_whole(self):
        corpus = topics.load_corpus(DATA / "lda_ap")
        assert (corpus.documents, corpus.vocabulary, len(corpus.words)) == (2_246, 10_473, 435_838)

    def test_a_file_that_is_something_else_is_named(self, tmp_path):
        (tmp_path / "ap.dat").write_text("2 apples and pears\n")
        with pytest.raises(DataError, match="is not in lda-c's format"):
            topics.load_corpus(tmp_path)


class TestExamples:
    def test_rows_are_chosen_with_their_entries(self):
        whole = svmlight.make(20, 9, 3, 0)
        rows = np.array([4, 4, 19, 0])
        np.testing.assert_array_equal(whole.chosen(rows).dense(), whole.dense()[rows])
        assert whole.chosen(np.empty(0, dtype=np.int64)).rows == 0

    @pytest.mark.parametrize("features", [1, 9, 10, 11])
    def test_few_features_make_examples_too(self, features):
        train, _ = logreg.make(20, features, 0)
        assert train.feature.max() < features

    def test_a_line_that_is_no_example_is_named(self, tmp_path):
        (tmp_path / "x").write_text("1 3:1\n-1 nonsense\n")
        with pytest.raises(DataError, match="is not in LIBSVM's format"):
            svmlight.load(tmp_path / "x")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "task", ["lasso", *(pytest.param(name, marks=pytest.mark.soak) for name in ("factorize", "logreg", "topics"))]
)
def test_the_same_task_runs_on_real_processes(task):
    run = paceline.launch(
        tasks.get(task), engine="local", workers=2, strategy="ssp:staleness=2", options={"clocks": "60"}
    )
    assert run.ended == "done"
    assert run.summary.metrics["loss"] < first_loss(task)
