"""DistServe's iteration times: affine, as fitted by its authors to an A100-80GB SXM.

Zhong et al., OSDI 2024, section 4; form and constants from the paper's artefact
(LLMServe/DistServe, commit 82831f1: simdistserve/estimators/time_estimator.py and
profile_data/profiler-a100-80g.{distserve,vllm}.json, Apache-2.0), fp16, milliseconds.
There are no constants for OPT-175B.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pdjax.core.config import Link
from pdjax.core.events import Send
from pdjax.cost import Cost
from pdjax.costs.batch import Batch, CostError, decode_ns_at_once, step_ns_by

LARGE_BATCH = 95
"""Decodes per batch from which the second set of coefficients holds."""

MILLISECOND = 1e-3


class Coefficients(NamedTuple):
    """prefill: a + b * tokens + c * squares of prompt lengths. small, large: a + b * context
    tokens + c * requests."""

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]


FITS: Mapping[tuple[str, str, int], Coefficients] = {
    ("distserve", "opt-13b", 1): Coefficients(
        (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
        (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
        (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    ),
    ("distserve", "opt-13b", 2): Coefficients(
        (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
        (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
        (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
    ),
    ("distserve", "opt-13b", 4): Coefficients(
        (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
        (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
        (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
    ),
    ("distserve", "opt-66b", 2): Coefficients(
        (43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
        (48.288015489286245, 0.0009424343535737985, 0.12755020094383188),
        (28.727693993711597, 0.00047448475459061987, 0.29617792360743994),
    ),
    ("distserve", "opt-66b", 3): Coefficients(
        (32.998230028437035, 0.19568256864690514, 1.2205248980953765e-05),
        (35.8015439512012, 0.0005845004786127403, 0.0952669764890301),
        (22.653861586978355, 0.0005358489190129727, 0.208514444037787),
    ),
    ("distserve", "opt-66b", 4): Coefficients(
        (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
        (30.760284619429587, 0.000451947603788462, 0.063284195750671),
        (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
    ),
    ("distserve", "opt-66b", 8): Coefficients(
        (25.490662375045222, 0.10659177664763161, 3.3910502518615973e-06),
        (23.15511135047022, 0.00022691488497826264, 0.04800638397272423),
        (21.71772781576609, 0.0003758089655762475, 0.08978614175851013),
    ),
    ("vllm", "opt-13b", 1): Coefficients(
        (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
        (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
        (20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
    ),
    ("vllm", "opt-13b", 2): Coefficients(
        (27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
        (24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
        (17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
    ),
    ("vllm", "opt-13b", 4): Coefficients(
        (30.536322590049405, 0.05150644936810146, 4.232473132942393e-07),
        (25.90114444283343, 7.753634454230709e-05, 0.05528087160867803),
        (23.88388468859458, 0.00028400164093310935, 0.06276523831046728),
    ),
    ("vllm", "opt-66b", 2): Coefficients(
        (58.3822026348141, 0.3826408030281867, -7.1141486747694485e-06),
        (57.07344137197128, 0.0036461138777547255, 0.2249373634499222),
        (26.983759428854572, 0.006200132376379982, 0.4482569479277445),
    ),
    ("vllm", "opt-66b", 3): Coefficients(
        (45.74453423698261, 0.2778127747865773, 3.64624693008797e-05),
        (44.93958620555262, 0.0008096152552620141, 0.21287979591036174),
        (43.69602916834496, 0.0008402567346080152, 0.24006467608312998),
    ),
    ("vllm", "opt-66b", 4): Coefficients(
        (42.965489361973944, 0.2128658422785494, 4.601017396226869e-05),
        (39.58178936012414, 0.0006945721692406896, 0.13580868185596764),
        (40.859718006896806, 0.0004264871259058686, 0.19508372547790553),
    ),
    ("vllm", "opt-66b", 8): Coefficients(
        (38.931193445523604, 0.1573682229779579, 4.531676245669589e-06),
        (31.176041922273107, 0.00027556543631760213, 0.0679770397053775),
        (29.087774405517447, 0.0006027720257746419, 0.1389608688300688),
    ),
}
"""By engine (`distserve` or its baseline `vllm`, of 2023), model and tp."""


def distserve(
    model: str,
    tp: int,
    link: Link,
    send_bytes: Callable[[Send], int],
    *,
    engine: str = "distserve",
) -> Cost:
    """The cost of an instance of `tp` GPUs, without pipeline stages.

    The paper has no chunks of prompts and no mixed steps (its simulator takes decodes beside
    chunks for free). Here a chunk adds to the squares what it adds to the square of its prompt,
    and decodes beside chunks add what they read and how many they are.
    Raises CostError for a fit that was not published.
    """
    if (engine, model, tp) not in FITS:
        known = ", ".join(f"{m} tp {t}" for e, m, t in FITS if e == engine)
        raise CostError(
            f"DistServe published no fit of `{model}` with tp {tp} for the engine `{engine}`; "
            f"there are {known or 'fits of the engines distserve and vllm'}"
        )
    fit = FITS[engine, model, tp]

    def seconds(batch: Batch) -> float:
        return _seconds(fit, batch)

    return Cost(step_ns_by(seconds), send_bytes, link, decode_ns_at_once(seconds))


def _seconds(fit: Coefficients, batch: Batch) -> float:
    a, b, c = fit.small if batch.decodes < LARGE_BATCH else fit.large
    decode_ms = b * batch.context + c * batch.decodes
    if batch.chunks:
        a, b, c = fit.prefill
        squares = sum((start + length) ** 2 - start**2 for start, length in batch.chunks)
        decode_ms += b * batch.prompt_tokens + c * squares
    return (a + decode_ms) * MILLISECOND


KV_TOKENS: Mapping[tuple[str, int, int], int] = {
    ("opt-13b", 1, 1): 66_144,
    ("opt-13b", 1, 2): 163_008,
    ("opt-13b", 1, 4): 356_752,
    ("opt-13b", 1, 5): 453_616,
    ("opt-13b", 1, 8): 744_224,
    ("opt-13b", 2, 1): 163_008,
    ("opt-13b", 2, 2): 356_752,
    ("opt-13b", 2, 4): 744_224,
    ("opt-13b", 2, 5): 937_968,
    ("opt-13b", 2, 8): 1_519_184,
    ("opt-13b", 4, 1): 356_736,
    ("opt-13b", 4, 2): 744_224,
    ("opt-13b", 4, 4): 1_519_168,
    ("opt-13b", 5, 1): 453_600,
    ("opt-13b", 5, 2): 937_952,
    ("opt-13b", 8, 1): 744_208,
    ("opt-13b", 8, 2): 1_519_168,
    ("opt-66b", 1, 2): 11_600,
    ("opt-66b", 1, 4): 78_512,
    ("opt-66b", 1, 8): 212_320,
    ("opt-66b", 2, 1): 11_600,
    ("opt-66b", 2, 2): 78_512,
    ("opt-66b", 2, 4): 212_320,
    ("opt-66b", 2, 8): 479_952,
    ("opt-66b", 3, 1): 45_056,
    ("opt-66b", 3, 2): 145_408,
    ("opt-66b", 3, 4): 346_128,
    ("opt-66b", 4, 1): 78_496,
    ("opt-66b", 4, 2): 212_320,
    ("opt-66b", 4, 4): 479_936,
    ("opt-66b", 6, 1): 145_408,
    ("opt-66b", 6, 2): 346_128,
    ("opt-66b", 8, 1): 212_304,
    ("opt-66b", 8, 2): 479_936,
    ("opt-175b", 1, 6): 26_208,
    ("opt-175b", 1, 8): 59_536,
    ("opt-175b", 2, 3): 26_208,
    ("opt-175b", 2, 4): 59_536,
    ("opt-175b", 2, 6): 126_160,
    ("opt-175b", 2, 8): 192_800,
    ("opt-175b", 3, 2): 26_208,
    ("opt-175b", 3, 3): 76_192,
    ("opt-175b", 3, 4): 126_160,
    ("opt-175b", 4, 2): 59_520,
    ("opt-175b", 4, 3): 126_160,
    ("opt-175b", 4, 4): 192_800,
    ("opt-175b", 6, 1): 26_208,
    ("opt-175b", 6, 2): 126_160,
    ("opt-175b", 8, 1): 59_520,
    ("opt-175b", 8, 2): 192_784,
}
"""Tokens of KV that fit beside the weights, by model, tp and pipeline stages, in blocks of 16: the
artefact's max_num_tokens.csv."""
