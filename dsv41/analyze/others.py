"""The models that V4.1-Flash is compared with, as data: V4-Flash, V3.2 and V1 67B (serving §1.1, §9)."""

from dsv41.analyze.costs import CORE, SCORES, Format, Model, Reads, Rows, Weights


def v4_flash() -> Model:
    """43 layers: 2 window only, 21 of ratio 4 that select 512 rows, 20 of ratio 128 that read every row."""
    d, heads, k, vocab, layers = 4096, 64, 512, 129280, 43
    selecting, dense = 21, 20
    q_rank, groups, rank = 1024, 8, 1024
    index_heads, index_width = 64, 128
    experts, chosen, f, streams, window = 256, 6, 2048, 4, 128
    attention = d * q_rank + q_rank * heads * k + d * k + heads * k * rank + groups * rank * d
    expert = 3 * d * f
    # Ratio 4 pools overlapping groups of twice the width, for the rows and for the index keys.
    compressors = selecting * 4 * d * (k + index_width) + dense * 2 * d * k

    def always(part: str, size: int, format: Format = "fp8") -> Weights:
        return Weights(part, size, size, size, format)

    def core(layers: int, ratio: int, limit: int | None) -> Reads:
        return Reads(CORE, layers, 2 * heads * k, ratio, limit)

    routed = layers * chosen * expert
    return Model(
        name="v4-flash",
        title="V4-Flash",
        weights=(
            Weights("embedding", vocab * d, 0, 0),
            always("attention projections", layers * attention),
            always("compressors", compressors, "bf16"),
            always("index queries", selecting * q_rank * index_heads * index_width),
            always("index head weights", selecting * d * index_heads, "bf16"),
            always("router", layers * d * experts, "bf16"),
            Weights("routed experts", layers * experts * expert, routed, routed),
            always("shared experts", layers * expert),
            always("mHC", layers * 2 * streams * d * streams * (streams + 2), "bf16"),
            always("head", vocab * d, "bf16"),
        ),
        reads=(
            core(layers, 1, window),
            core(selecting, 4, 512),
            core(dense, 128, None),
            Reads(SCORES, selecting, index_heads * index_width, 4, None, "fp4"),
        ),
        rows=(Rows("main KV", selecting, 584, 4), Rows("main KV", dense, 584, 128), Rows("index keys", selecting, 68, 4)),
        fixed={"windows": layers * window * 584},
    )


def v32() -> Model:
    """61 layers of MLA, each with an index of its own that selects 2048 rows; 3 dense layers, then 58 of experts."""
    d, heads, latent, rope, vocab, layers = 7168, 128, 512, 64, 129280, 61
    q_rank, nope, value = 1536, 128, 128
    index_heads, index_width = 64, 128
    experts, chosen, f, dense_f, dense = 256, 8, 2048, 18432, 3
    sparse, expert = layers - dense, 3 * d * f
    projections = d * q_rank + q_rank * heads * (nope + rope) + d * (latent + rope) + heads * value * d
    routed = sparse * chosen * expert

    def always(part: str, size: int, format: Format = "fp8") -> Weights:
        return Weights(part, size, size, size, format)

    return Model(
        name="v3.2",
        title="V3.2",
        weights=(
            Weights("embedding", vocab * d, 0, 0),
            always("attention projections", layers * projections),
            # Keys and values stay latent: the query and the output are mapped instead.
            always("absorbed key and value maps", layers * 2 * heads * nope * latent, "bf16"),
            always("index queries", layers * q_rank * index_heads * index_width),
            always("index keys", layers * d * index_width),
            always("index head weights", layers * d * index_heads, "bf16"),
            always("router", sparse * d * experts, "bf16"),
            Weights("routed experts", sparse * experts * expert, routed, routed),
            always("shared experts", sparse * expert),
            always("dense MLPs", dense * 3 * d * dense_f),
            always("head", vocab * d, "bf16"),
        ),
        reads=(
            Reads(CORE, layers, heads * (latent + rope + latent), 1, 2048),
            Reads(SCORES, layers, index_heads * index_width, 1, None, "fp8"),
        ),
        # 512 FP8 values, four float32 scales, 64 bfloat16 rotary channels; 128 FP8 values and a scale.
        rows=(Rows("main KV", layers, latent + 16 + 2 * rope), Rows("index keys", layers, index_width + 4)),
        fixed={},
    )


def v1() -> Model:
    """95 layers of grouped-query attention over all tokens, in bfloat16."""
    d, kv, f, vocab, layers = 8192, 8 * 128, 22016, 102400, 95

    def always(part: str, size: int) -> Weights:
        return Weights(part, size, size, size, "bf16")

    return Model(
        name="v1",
        title="V1 67B",
        weights=(
            Weights("embedding", vocab * d, 0, 0),
            always("attention projections", layers * 2 * d * (d + kv)),
            always("dense MLPs", layers * 3 * d * f),
            always("head", vocab * d),
        ),
        reads=(Reads(CORE, layers, 2 * d, 1, None),),
        rows=(Rows("keys and values", layers, 2 * kv * 2),),
        fixed={},
    )


OTHERS = {"v4-flash": v4_flash, "v3.2": v32, "v1": v1}
