"""Asks functions of SciPy and scikit-learn with arrays of a device, and with NumPy's, and compares.

    python tests/interop/array_api_callers.py [--record FILE] [NAME...]

prints a JSON document. Of each function it has the outcome: "device" (computed by functions of the namespace
alone), "partly" (some of it by NumPy, from copies on the host), "host" (the result is NumPy's), or the error.
``--record`` writes it in place of that of the same backend, with the date and the versions; the pages show
``docs/array_api_callers.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Both read it when they are imported.
os.environ["SCIPY_ARRAY_API"] = "1"
sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np
import scipy.cluster.hierarchy
import scipy.cluster.vq
import scipy.special
import scipy.stats
from array_api_module import BACKEND, xp

from trio_accel.interop import Array

Inputs = SimpleNamespace
Call = Callable[[Inputs], Any]

_stats = scipy.stats
_vq, _hierarchy = scipy.cluster.vq, scipy.cluster.hierarchy


def _inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, y, points = rng.random(20) + 0.1, rng.random(20) + 0.2, rng.random((12, 3))
    samples = rng.normal(size=(60, 5))
    return {
        "x": x,
        "y": y,
        "points": points,
        "table": np.abs(rng.normal(size=(30, 4))) + 0.1,
        "links": scipy.cluster.hierarchy.linkage(points),
        "samples": samples,
        "classes": (samples[:, 0] + 0.3 * rng.normal(size=60) > 0).astype(np.int64),
        "guesses": (samples[:, 1] > 0).astype(np.int64),
        "targets": np.abs(samples @ np.arange(5.0)) + 1,
        "numbers": np.abs(samples[:, 0]) + 1,
        "chances": 1 / (1 + np.exp(-samples[:, 0])),
    }


def _scipy() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    special, stats, vq, hierarchy = scipy.special, _stats, _vq, _hierarchy
    one = "digamma entr erf erfc exp1 expit expm1 gamma gammaln i0 i0e i1 i1e j0 j1 log_ndtr log1p ndtr sinc"
    for name in one.split():
        calls[f"special.{name}"] = lambda d, f=getattr(special, name): f(d.x)
    for name in ("logit", "ndtri"):
        calls[f"special.{name}"] = lambda d, f=getattr(special, name): f(d.x / 2)
    for name in "gammainc gammaincc kl_div rel_entr chdtr chdtrc stdtr xlogy xlog1py".split():
        calls[f"special.{name}"] = lambda d, f=getattr(special, name): f(d.x, d.y)
    for name in "logsumexp softmax log_softmax".split():
        calls[f"special.{name}"] = lambda d, f=getattr(special, name): f(d.table, axis=1)
    calls["special.betainc"] = lambda d: special.betainc(d.x, d.y, d.x / 2)
    calls["special.multigammaln"] = lambda d: special.multigammaln(d.x + 3, 2)
    calls["special.zeta"] = lambda d: special.zeta(d.x + 2, d.y)
    one = (
        "circmean circstd circvar describe differential_entropy directional_stats entropy gmean gstd gzscore "
        "hmean iqr jarque_bera kstat kstatvar kurtosis kurtosistest lmoment median_abs_deviation mode normaltest "
        "rankdata sem skew skewtest tmax tmean tmin tsem tstd tvar variation zscore"
    )
    for name in one.split():
        calls[f"stats.{name}"] = lambda d, f=getattr(stats, name): f(d.table)
    calls["stats.boxcox_llf"] = lambda d: stats.boxcox_llf(0.5, d.x)
    calls["stats.moment"] = lambda d: stats.moment(d.table, order=2)
    calls["stats.pmean"] = lambda d: stats.pmean(d.table, 2)
    calls["stats.quantile"] = lambda d: stats.quantile(d.table, 0.3)
    calls["stats.sigmaclip"] = lambda d: stats.sigmaclip(d.x)
    calls["stats.trim_mean"] = lambda d: stats.trim_mean(d.table, 0.1)
    calls["stats.ttest_1samp"] = lambda d: stats.ttest_1samp(d.x, 0.5)
    calls["stats.friedmanchisquare"] = lambda d: stats.friedmanchisquare(d.x, d.y, d.x * d.y)
    calls["stats.chisquare"] = lambda d: stats.chisquare(d.x)
    calls["stats.power_divergence"] = lambda d: stats.power_divergence(d.x)
    for name in ("combine_pvalues", "false_discovery_control"):
        calls[f"stats.{name}"] = lambda d, f=getattr(stats, name): f(d.x / 2)
    two = (
        "alexandergovern ansari bartlett brunnermunzel cramervonmises_2samp epps_singleton_2samp f_oneway "
        "fligner kruskal levene mannwhitneyu mood pearsonr pointbiserialr ttest_ind ttest_rel wilcoxon zmap"
    )
    for name in two.split():
        calls[f"stats.{name}"] = lambda d, f=getattr(stats, name): f(d.x, d.y)
    calls["cluster.vq.whiten"] = lambda d: vq.whiten(d.points)
    calls["cluster.vq.vq"] = lambda d: vq.vq(d.points, d.points[:3, :])
    calls["cluster.vq.kmeans"] = lambda d: vq.kmeans(d.points, d.points[:3, :])
    calls["cluster.vq.kmeans2"] = lambda d: vq.kmeans2(d.points, d.points[:3, :], minit="matrix")
    for name in "average centroid complete linkage median single ward weighted".split():
        calls[f"cluster.hierarchy.{name}"] = lambda d, f=getattr(hierarchy, name): f(d.points)
    one = "cophenet inconsistent is_monotonic is_valid_linkage leaves_list maxdists num_obs_linkage to_mlab_linkage"
    for name in one.split():
        calls[f"cluster.hierarchy.{name}"] = lambda d, f=getattr(hierarchy, name): f(d.links)
    calls["cluster.hierarchy.fcluster"] = lambda d: hierarchy.fcluster(d.links, 0.5, "distance")
    calls["cluster.hierarchy.fclusterdata"] = lambda d: hierarchy.fclusterdata(d.points, 0.5)
    return calls


def _scikit_learn() -> dict[str, Call]:
    """Return what its page "Array API support" lists."""
    if find_spec("sklearn") is None:
        return {}
    names = (
        "calibration decomposition discriminant_analysis kernel_approximation linear_model metrics mixture "
        "model_selection naive_bayes pipeline preprocessing"
    )
    sk = SimpleNamespace(**{name: import_module(f"sklearn.{name}") for name in names.split()})
    calls: dict[str, Call] = {}
    for name in "Binarizer KernelCenterer LabelBinarizer LabelEncoder MaxAbsScaler MinMaxScaler Normalizer".split():
        given = {"KernelCenterer": "square"}.get(name, "classes" if name.startswith("Label") else "samples")
        calls[f"preprocessing.{name}"] = lambda d, f=getattr(sk.preprocessing, name), given=given: f().fit_transform(
            d.samples[:5, :] if given == "square" else getattr(d, given)
        )
    for name in "PolynomialFeatures StandardScaler".split():
        calls[f"preprocessing.{name}"] = lambda d, f=getattr(sk.preprocessing, name): f().fit_transform(d.samples)
    for solver in ("full", "covariance_eigh", "randomized"):
        # The signs of the components are free.
        calls[f"decomposition.PCA({solver})"] = lambda d, solver=solver: abs(
            sk.decomposition.PCA(
                2, svd_solver=solver, power_iteration_normalizer="QR", random_state=0
            ).fit_transform(d.samples)
        )
    linear, mixture, naive_bayes = sk.linear_model, sk.mixture, sk.naive_bayes
    lda = sk.discriminant_analysis.LinearDiscriminantAnalysis
    ridge = lambda: linear.Ridge(solver="svd")  # noqa: E731
    scaled = lambda: sk.pipeline.make_pipeline(sk.preprocessing.StandardScaler(), ridge())  # noqa: E731
    grid = lambda: sk.model_selection.GridSearchCV(ridge(), {"alpha": [0.1, 1.0]}, cv=3)  # noqa: E731
    for label, make, target in (
        ("linear_model.Ridge(svd)", ridge, "targets"),
        ("linear_model.RidgeCV", linear.RidgeCV, "targets"),
        ("linear_model.RidgeClassifier(svd)", lambda: linear.RidgeClassifier(solver="svd"), "classes"),
        ("linear_model.RidgeClassifierCV", linear.RidgeClassifierCV, "classes"),
        ("linear_model.LogisticRegression(lbfgs)", linear.LogisticRegression, "classes"),
        ("linear_model.PoissonRegressor", linear.PoissonRegressor, "classes"),
        ("discriminant_analysis.LinearDiscriminantAnalysis", lda, "classes"),
        ("naive_bayes.GaussianNB", naive_bayes.GaussianNB, "classes"),
        ("pipeline.make_pipeline(StandardScaler, Ridge)", scaled, "targets"),
        ("model_selection.GridSearchCV(Ridge)", grid, "targets"),
    ):
        calls[label] = lambda d, make=make, target=target: make().fit(d.samples, getattr(d, target)).predict(d.samples)
    calls["mixture.GaussianMixture"] = lambda d: (
        mixture.GaussianMixture(2, init_params="random", random_state=0).fit(d.samples).predict_proba(d.samples)
    )
    calls["kernel_approximation.Nystroem"] = lambda d: sk.kernel_approximation.Nystroem(
        n_components=5, random_state=0
    ).fit_transform(d.samples)
    calls["calibration.CalibratedClassifierCV(temperature)"] = lambda d: (
        sk.calibration.CalibratedClassifierCV(lda(), method="temperature", cv=2)
        .fit(d.samples, d.classes)
        .predict_proba(d.samples)
    )
    selection = sk.model_selection
    calls["model_selection.train_test_split"] = lambda d: selection.train_test_split(d.samples, random_state=0)
    calls["model_selection.cross_val_predict(LDA)"] = lambda d: selection.cross_val_predict(
        lda(), d.samples, d.classes, cv=3
    )
    return calls | _metrics(sk.metrics)


def _metrics(metrics: Any) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    names = (
        "accuracy_score balanced_accuracy_score cohen_kappa_score confusion_matrix f1_score hamming_loss "
        "jaccard_score multilabel_confusion_matrix precision_recall_fscore_support precision_score "
        "recall_score zero_one_loss"
    )
    for name in names.split():
        calls[f"metrics.{name}"] = lambda d, f=getattr(metrics, name): f(d.classes, d.guesses)
    calls["metrics.fbeta_score"] = lambda d: metrics.fbeta_score(d.classes, d.guesses, beta=2.0)
    names = (
        "d2_absolute_error_score d2_pinball_score d2_tweedie_score explained_variance_score max_error "
        "mean_absolute_error mean_absolute_percentage_error mean_gamma_deviance mean_pinball_loss "
        "mean_poisson_deviance mean_squared_error mean_squared_log_error mean_tweedie_deviance "
        "median_absolute_error r2_score root_mean_squared_error root_mean_squared_log_error"
    )
    for name in names.split():
        calls[f"metrics.{name}"] = lambda d, f=getattr(metrics, name): f(d.targets, d.numbers)
    names = (
        "average_precision_score brier_score_loss d2_brier_score det_curve log_loss precision_recall_curve "
        "roc_auc_score roc_curve"
    )
    for name in names.split():
        calls[f"metrics.{name}"] = lambda d, f=getattr(metrics, name): f(d.classes, d.chances)
    names = (
        "additive_chi2_kernel chi2_kernel cosine_distances cosine_similarity euclidean_distances laplacian_kernel "
        "linear_kernel manhattan_distances paired_cosine_distances paired_euclidean_distances pairwise_distances "
        "polynomial_kernel rbf_kernel sigmoid_kernel"
    )
    for name in names.split():
        calls[f"metrics.pairwise.{name}"] = lambda d, f=getattr(metrics.pairwise, name): f(
            abs(d.samples), abs(d.samples) + 0.5
        )
    return calls


class Copies:
    """Counts the copies to the host that NumPy asks for."""

    def __init__(self) -> None:
        self.count = 0
        self._copy = Array.__array__
        setattr(Array, "__array__", lambda *args, **kwargs: self._counted(*args, **kwargs))  # noqa: B010

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._copy(*args, **kwargs)


def _parts(result: Any) -> list[Any]:
    """Return the arrays and numbers of a result, which may be one, several, or an object that has them."""
    if isinstance(result, (tuple, list)):
        return [part for one in result for part in _parts(one)]
    if isinstance(result, (Array, np.ndarray, np.generic, int, float, complex)):
        return [result]
    return [part for name in sorted(vars(result)) if name[0] != "_" for part in _parts(getattr(result, name))]


def outcome_of(call: Call, inputs: dict[str, Any], copies: Copies) -> str:
    """Ask with NumPy's arrays and with a device's, and say where the second was computed."""
    wanted = _parts(call(Inputs(**inputs)))
    on_device = Inputs(**{name: xp.asarray(array) for name, array in inputs.items()})
    copies.count = 0
    try:
        parts = _parts(call(on_device))
    except Exception as error:  # noqa: BLE001  # of another library; it is what is recorded
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    count = copies.count
    for want, part in zip(wanted, parts, strict=True):
        np.testing.assert_allclose(np.asarray(part), want, rtol=1e-6, atol=1e-8)
    if any(isinstance(part, (np.ndarray, np.generic)) for part in parts):
        return "host"
    return "partly" if count else "device"


def main() -> None:
    """Ask what the command line says, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, default=None)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    copies, inputs = Copies(), _inputs()
    outcomes: dict[str, dict[str, str]] = {}
    for library, calls in (("scipy", _scipy()), ("scikit-learn", _scikit_learn())):
        context: Any = import_module("contextlib").nullcontext()
        if library == "scikit-learn" and calls:
            context = import_module("sklearn").config_context(array_api_dispatch=True)
        with context:
            chosen = {name: call for name, call in calls.items() if not given.names or name in given.names}
            outcomes[library] = {name: outcome_of(call, inputs, copies) for name, call in chosen.items()}
    sys.stdout.write(json.dumps(outcomes, indent=1) + "\n")
    if given.record is not None:
        records = json.loads(given.record.read_text(encoding="utf-8")) if given.record.exists() else {}
        records[BACKEND] = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"Python": platform.python_version()}
            | {library: metadata.version(library) for library, found in outcomes.items() if found},
            "outcomes": {
                f"{library} {name}": outcome
                for library, found in outcomes.items()
                for name, outcome in sorted(found.items())
            },
        }
        given.record.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
