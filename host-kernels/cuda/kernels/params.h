/* What the host passes to kernels. Three compilers read this file: NVRTC (or nvcc), the C++ compiler of the
 * CPU build, and bindgen, which gives the host the same structures. Plain C, no includes, and no
 * padding: structures are passed on as bytes. */
#pragma once

/* Element types: the ids of the wire (transport's `Type`). */
enum VgType {
    VG_F32 = 0,
    VG_F16 = 1,
    VG_Q4_0 = 2,
    VG_Q4_1 = 3,
    VG_Q5_0 = 6,
    VG_Q5_1 = 7,
    VG_Q8_0 = 8,
    VG_Q8_1 = 9,
    VG_Q2_K = 10,
    VG_Q3_K = 11,
    VG_Q4_K = 12,
    VG_Q5_K = 13,
    VG_Q6_K = 14,
    VG_Q8_K = 15,
    VG_IQ2_XXS = 16,
    VG_IQ2_XS = 17,
    VG_IQ3_XXS = 18,
    VG_IQ1_S = 19,
    VG_IQ4_NL = 20,
    VG_IQ3_S = 21,
    VG_IQ2_S = 22,
    VG_IQ4_XS = 23,
    VG_I8 = 24,
    VG_I16 = 25,
    VG_I32 = 26,
    VG_I64 = 27,
    VG_F64 = 28,
    VG_IQ1_M = 29,
    VG_BF16 = 30,
    VG_TQ1_0 = 34,
    VG_TQ2_0 = 35,
    VG_MXFP4 = 39,
    VG_NVFP4 = 40,
    VG_Q1_0 = 41,
    VG_Q2_0 = 42,
};

/* With the id of a type: its blocks lie in planes. The quants of all blocks of a matrix (ne[0] by ne[1], contiguous), one
 * after the other, then their scales in the same order; `repack.cu` says what of a block is which. It takes the same bytes,
 * and strides are those of the type as ggml has it. */
#define VG_REPACKED 0x100

/* A tensor: the address of its first element, extents (ne[0] the fastest) and strides in bytes. nb[0] is from
 * block to block for quantised types. `data` is 0 for a tensor that is not there. */
struct VgView {
    unsigned long long data;
    long long ne[4];
    long long nb[4];
    unsigned type;
    unsigned reserved;
};

/* The codebooks of the IQ formats: eight (IQ3: four) magnitudes plus 64 in the bytes of each entry; of IQ1 eight
 * times the values plus 15. */
struct VgCodebooks {
    unsigned long long iq2_xxs[256];
    unsigned long long iq2_xs[512];
    unsigned long long iq2_s[1024];
    unsigned long long iq3_xxs[256];
    unsigned long long iq3_s[512];
    unsigned long long iq1[2048];
};

/* Where a kernel says that an index in tensor data points nowhere. The first one to say so wins. */
struct VgFault {
    unsigned taken;
    unsigned node; /* of the graph */
    long long index;
    long long count;
};

/* Which fault to fill in, and what node the kernel belongs to. */
struct VgFaultSite {
    unsigned long long fault; /* VgFault * */
    unsigned node;
    unsigned reserved;
};

/* vg_elementwise: dst[i] = f(a[i], b[i]), sources repeated over the destination. */
enum VgElementwiseOp {
    VG_OP_ADD,
    VG_OP_SUB,
    VG_OP_MUL,
    VG_OP_DIV,
    VG_OP_SCALE,      /* a * c[0] + c[1] */
    VG_OP_CLAMP,      /* to c[0]..c[1] */
    VG_OP_SQR,
    VG_OP_SQRT,
    VG_OP_LOG,
    VG_OP_SIN,
    VG_OP_COS,
    VG_OP_LEAKY_RELU, /* slope c[0] */
    VG_OP_XIELU,      /* alpha_n, alpha_p, beta, eps */
    VG_OP_SILU_BACK,  /* gradient a, input b */
    VG_OP_ABS,
    VG_OP_SGN,
    VG_OP_NEG,
    VG_OP_STEP,
    VG_OP_TANH,
    VG_OP_ELU,
    VG_OP_RELU,
    VG_OP_SIGMOID,
    VG_OP_GELU,
    VG_OP_GELU_QUICK,
    VG_OP_SILU,
    VG_OP_HARDSWISH,
    VG_OP_HARDSIGMOID,
    VG_OP_EXP,
    VG_OP_EXPM1,
    VG_OP_SOFTPLUS,
    VG_OP_GELU_ERF,
    VG_OP_FLOOR,
    VG_OP_CEIL,
    VG_OP_ROUND,
    VG_OP_TRUNC,
    /* Gated linear units: f(a) times b. */
    VG_OP_REGLU,
    VG_OP_GEGLU,
    VG_OP_SWIGLU,
    VG_OP_SWIGLU_OAI, /* alpha, limit */
    VG_OP_GEGLU_ERF,
    VG_OP_GEGLU_QUICK,
    VG_OP_SWIGLU_CLAMP, /* alpha unused, limit */
};

struct VgElementwiseParams {
    struct VgView dst, a, b;
    float c[4];
    unsigned op; /* enum VgElementwiseOp */
    unsigned flat; /* all operands there are f32, dense and of the same extents */
};

/* vg_add_id: dst[:, u, t] = a[:, u, t] + b[:, ids[u, t]]. */
struct VgAddIdParams {
    struct VgView dst, a, b, ids;
    struct VgFaultSite place;
};

/* vg_copy: all elements of src in order, as elements of dst. */
struct VgCopyParams {
    struct VgView dst, src;
    unsigned long long codebooks; /* VgCodebooks * */
};

/* vg_move: dst[i] = src[f(i)], elements as they are, of `size` bytes (of quantised types: blocks, which
 * dimension 0 then counts). */
enum VgMove {
    VG_MOVE_REPEAT,   /* i modulo the extents of src */
    VG_MOVE_PAD,      /* i - shift, 0 where that is outside */
    VG_MOVE_CIRCULAR, /* i - shift, round and round */
    VG_MOVE_REFLECT,  /* i - shift, mirrored at the ends of dimension 0 */
    VG_MOVE_DIAG,     /* src[i1] where i0 = i1, 0 elsewhere */
    VG_MOVE_KEEP,     /* i where low <= i0 - i1 < high, `other` elsewhere */
    VG_MOVE_FILL,     /* `other` */
};

struct VgMoveParams {
    struct VgView dst, src;
    long long shift[4];
    long long low, high;
    unsigned long long other; /* the bits of an element */
    unsigned size;
    unsigned op; /* enum VgMove */
};

/* vg_repeat_back: sums of what was repeated. */
struct VgRepeatBackParams {
    struct VgView dst, src;
};

/* vg_arange */
struct VgArangeParams {
    struct VgView dst;
    float start, step;
};

/* vg_get_rows, vg_get_rows_back, vg_set_rows */
struct VgRowsParams {
    struct VgView dst, src, ids;
    unsigned long long codebooks;
    struct VgFaultSite place;
};

/* vg_norm: what is done with each row (of GROUP: with the channels of a group). */
enum VgNorm {
    VG_NORM_STANDARD, /* (x - mean) / sqrt(variance + eps) */
    VG_NORM_RMS,      /* x / sqrt(mean of squares + eps) */
    VG_NORM_L2,       /* x / max(length, eps) */
    VG_NORM_RMS_BACK, /* a gradient, b input */
    VG_NORM_SOFT_MAX_BACK, /* a gradient, b result; eps is the scale */
};

struct VgNormParams {
    struct VgView dst, a, b;
    float eps;
    unsigned op; /* enum VgNorm */
};

struct VgGroupNormParams {
    struct VgView dst, src;
    long long channels; /* of a group */
    float eps;
    unsigned reserved;
};

/* vg_soft_max */
struct VgSoftMaxParams {
    struct VgView dst, src, mask, sinks;
    float scale, max_bias;
    unsigned heads_log2; /* the largest power of two of heads */
    unsigned reserved;
};

/* vg_rope */
struct VgRopeParams {
    struct VgView dst, src, positions, factors;
    int sections[4];
    unsigned mode; /* RopeMode of the IR */
    unsigned start, pairs;
    float step, sign, freq_scale, ext_factor, magnitude;
    float ramp[2];
};

/* vg_rope_rows: the rows of vg_rope, head after head, as rows `ids` of cache. rope.dst is not written. */
struct VgRopeRowsParams {
    struct VgRopeParams rope;
    struct VgView cache, ids;
    struct VgFaultSite place;
};

/* vg_norm_fused: x = a + add, into sum; dst = x / sqrt(mean of squares + eps) * w; the same rounded, as vg_quantize_q8
 * leaves it. What is 0 is not there; rows of add and w repeat. All f32, rows dense, at multiples of 16. */
struct VgNormFusedParams {
    struct VgView dst, a, add, sum, w;
    unsigned long long quants, scales;
    float eps;
    unsigned reserved;
};

/* vg_topk_moe: the experts of each token, the most probable first, and their weights. */
enum VgGating {
    VG_GATING_SOFT_MAX,
    VG_GATING_SIGMOID,
    VG_GATING_LOGITS, /* weights are the soft-max of the logits of those chosen */
};

struct VgTopkMoeParams {
    struct VgView logits, ids, weights; /* [experts, tokens], [used or more, tokens], [1, used, tokens] */
    unsigned long long bias; /* f32 for each expert: counts for the choice, not for the weights; or 0 */
    float least; /* of the sum that weights are divided by */
    float scale;
    unsigned used;
    unsigned op; /* enum VgGating */
    unsigned normalized;
    unsigned reserved;
};

/* vg_weighted_sum: dst[:, t] = sum over u of experts[:, u, t] * weights[0, u, t] */
struct VgWeightedSumParams {
    struct VgView dst, experts, weights;
};

/* vg_sum_rows, vg_cumsum, vg_argmax, vg_argsort */
struct VgReduceParams {
    struct VgView dst, src;
    double by;
    unsigned descending;
    unsigned columns; /* vg_argsort: a power of two, at least src.ne[0] */
    unsigned long long scratch;
};

/* vg_sum, vg_count_equal: partial results in scratch, then (`finish`) their sum. */
struct VgTotalParams {
    struct VgView dst, a, b;
    unsigned long long scratch;
    unsigned parts;
    unsigned finish;
};

/* vg_mul_mat, vg_mul_vec: dst[i, j, b] = sum over k of w[k, i, b / r] * x[k, j, b], b counting dimensions 2 and 3.
 * vg_mul_mat_id: dst[i, u, t] = sum over k of w[k, i, ids[u, t]] * x[k, u modulo its extent, t].
 * vg_out_prod: dst[i, j, b] = sum over k of w[i, k, b / r] * x[j, k, b]. */
struct VgMulMatParams {
    struct VgView dst, w, x, ids;
    unsigned long long codebooks;
    struct VgFaultSite place;
};

/* vg_quantize_q8: rows of src as blocks of 32: 32 signed bytes in quants, a factor and the sums of the halves of what they
 * stand for in scales (four floats). */
struct VgQuantizeQ8Params {
    struct VgView src;
    unsigned long long quants, scales;
};

/* A product with weights, plus `add` if that is there: of the extents of dst, or one row for all columns; with expert
 * ids a row for each expert. */
struct VgProduct {
    struct VgView dst, w, add;
};

/* vg_mmv_*, vg_mmv_*_cols8: as vg_mul_vec, of at most eight columns, or, with ids, as vg_mul_mat_id; with activations
 * from vg_quantize_q8, or with x as it is if weights are floats. Up to three products of the same activations; or two, of
 * which a gated unit is the result: of the first, times the second, in the first's dst. */
struct VgMmvParams {
    struct VgProduct products[3];
    struct VgView x, ids;
    unsigned long long quants, scales;
    unsigned long long codebooks;
    struct VgFaultSite place;
    long long slots; /* of the activations, in dimension 1 */
    float c[2];
    unsigned count; /* of products */
    unsigned unit;  /* enum VgElementwiseOp: the gated unit; VG_OP_ADD if there is none */
};

/* vg_megakernel, vg_megakernel_cols8: what a launch of another kernel would do, as a stage. */
enum VgStageOp {
    VG_STAGE_MMV, /* vg_mmv_* */
    VG_STAGE_NORM_FUSED,
    VG_STAGE_QUANTIZE_Q8,
    VG_STAGE_ROPE,
    VG_STAGE_ROPE_ROWS,
    VG_STAGE_SET_ROWS,
    VG_STAGE_SET_BLOCKS, /* vg_set_rows into quantised rows */
    VG_STAGE_GET_ROWS,
    VG_STAGE_ELEMENTWISE,
    VG_STAGE_ADD_ID,
    VG_STAGE_TOPK_MOE,
    VG_STAGE_WEIGHTED_SUM,
    VG_STAGE_FATTN_F16_64, /* vg_fattn_f16_64_decode */
    VG_STAGE_FATTN_F16_128,
    VG_STAGE_FATTN_BF16_64,
    VG_STAGE_FATTN_BF16_128,
    VG_STAGE_FATTN_QUANT_64,
    VG_STAGE_FATTN_QUANT_128,
};

/* Stages that a stage waits for, at most. */
enum { VG_MAX_WAITS = 6 };

/* Bytes from stage to stage in a table: a VgStage, then the parameters of its launch. */
enum { VG_STAGE_BYTES = 1152 };

/* Numbers of 32 bits from counter to counter: they lie in lines of their own. */
enum { VG_COUNTER_STRIDE = 32 };

/* A stage, and how many blocks count up when they are done with it. */
struct VgWait {
    unsigned stage;
    unsigned count;
};

struct VgStage {
    unsigned body;    /* enum VgStageOp */
    unsigned type;    /* of products: of the weights */
    unsigned grid[3]; /* of the launch; of products: pairs of rows, slots, tokens or batches */
    unsigned total;   /* what there is to do for blocks; of products: blocks of a pair for each warp */
    unsigned first;   /* the block of the step that does the first of that */
    unsigned waits;   /* how many */
    struct VgWait wait[VG_MAX_WAITS];
    unsigned next;      /* the next stage behind it that has products, or the number of stages */
    unsigned from;      /* of products: the stage, plus 1, that a block must have begun before it fetches weights; or 0 */
    unsigned following; /* bytes of the next stage, with its parameters */
    unsigned reserved;
};

struct VgMegakernelParams {
    unsigned long long table;    /* of `stages` times VG_STAGE_BYTES */
    unsigned long long counters; /* of blocks that are done: with the launch, then with each stage; 0 before and after */
    unsigned stages;
    unsigned products;  /* the first stage that has products, or `stages` */
    unsigned beginning; /* bytes of the first stage, with its parameters */
    unsigned ring;      /* bytes of weights on their way, for each warp */
};

/* vg_convert_f16: rows of src as halves (`brain`: bfloat16), each filled up to a multiple of 64, and what each row is to be
 * multiplied with. vg_split_bf16: as pairs of bfloat16, without factors. */
struct VgConvertF16Params {
    struct VgView src;
    unsigned long long halves, factors;
    unsigned long long codebooks;
    unsigned brain;
    unsigned reserved;
};

/* vg_moe_sort: slots of tokens in the order of their experts. In groups: for each expert and the end, where its slots begin
 * in the order; the same in tiles of columns; the order, of token * slots + slot. */
struct VgMoeSortParams {
    struct VgView ids;
    unsigned long long groups; /* unsigned[2 * (experts + 1) + slots * tokens + (align - 1) * experts] */
    struct VgFaultSite place;
    unsigned experts;
    unsigned columns; /* of a tile */
    unsigned align;   /* experts' slots begin at multiples of it; what is between them is ~0 */
    unsigned reserved;
};

/* vg_gemm_*: as vg_mul_mat, or with groups as vg_mul_mat_id, with activations from vg_convert_f16. */
struct VgGemmParams {
    struct VgView dst, w;
    unsigned long long halves, factors;
    unsigned long long codebooks;
    unsigned long long groups;
    long long slots; /* of the activations, in dimension 1 */
};

/* vg_convert_f16_sm90: as vg_convert_f16, for vg_gemm_sm90_*: in steps of 64 elements, of each step `rows` rows of 128 bytes, in
 * each of which elements lie as the kernels' threads have them in registers. Rows of src, each batch (of dimensions 2 and
 * 3) filled up to `padded` of them; or, with groups, in their order. */
struct VgConvertF16Sm90Params {
    struct VgView src;
    unsigned long long halves, factors;
    unsigned long long groups;
    long long rows, padded;
    unsigned experts;
    unsigned slots; /* of a token in the groups */
    unsigned brain;
    unsigned steps;
};

/* vg_gemm_sm90_*: as vg_gemm_*, with activations from vg_convert_f16_sm90. */
struct VgGemmSm90Params {
    struct VgView dst, w;
    unsigned long long halves, factors;
    unsigned long long groups;
    long long rows, padded;
};

/* vg_fattn_simt */
struct VgFattnSimtParams {
    struct VgView dst, q, k, v, mask, sinks;
    unsigned long long codebooks;
    float scale, cap, max_bias;
    unsigned heads_log2; /* the largest power of two of heads */
};

/* vg_attend_*: as vg_fattn_simt. `group` query heads, which have a head of keys and values in common, make the rows of a
 * tile with each token. */
struct VgFattnParams {
    struct VgView dst, q, k, v, mask, sinks;
    unsigned long long states;   /* from vg_fattn_mask_tiles, or 0 */
    unsigned long long parts;    /* sums of each split: scratch */
    unsigned long long counters; /* of splits that are done, 0 before and after: one for each tile of rows */
    unsigned long long codebooks;
    unsigned long long quants, scales; /* dst as vg_quantize_q8 leaves it, if quants is not 0; then it is dense */
    float scale, cap, max_bias;
    unsigned heads_log2; /* the largest power of two of heads */
    unsigned group;
    unsigned splits; /* blocks that share the keys of a tile of rows */
    unsigned raw;    /* bytes from row to row of the bytes of keys, and of values, in shared memory */
    unsigned reserved;
};

/* vg_fattn_mask_tiles: what the mask does with each tile of keys, for each tile of rows, a byte each: tiles of keys the
 * fastest, then tiles of rows, then dimensions 2 and 3 of the mask. */
struct VgFattnMaskTilesParams {
    struct VgView mask;
    unsigned long long states;
    int keys, tokens;
    unsigned group;
    unsigned rows, columns; /* of a tile */
    unsigned reserved;
};

/* An image, a kernel or results of a convolution: up to three dimensions, channels (of a kernel, those it sums up),
 * and images (of a kernel, results), with their distances in bytes. */
struct VgVolume {
    unsigned long long data;
    long long ne[3];
    long long nb[3];
    long long channel, image;
    unsigned type;
    unsigned reserved;
};

/* How a kernel moves in each dimension. */
struct VgConvGeometry {
    long long stride[3], padding[3], dilation[3];
};

/* vg_conv, vg_conv_depthwise (of each channel by itself), vg_conv_transposed */
struct VgConvParams {
    struct VgVolume dst, kernel, image;
    struct VgConvGeometry moves;
    long long channels, results, images;
};

/* vg_im2col: dst[k, x, y, z + depth * n] is tap k of the patch at (x, y, z) of image n. vg_im2col_back: the image from
 * the sum of its places in patches. */
struct VgIm2colParams {
    struct VgView patches;
    struct VgVolume image;
    struct VgConvGeometry moves;
    long long taps[3]; /* extents of the kernel */
    long long channels, images, depth;
};

/* vg_col2im_1d */
struct VgCol2imParams {
    struct VgView dst, src;
    long long stride, padding;
};

/* vg_pool; vg_pool_places and vg_pool_back (src is the gradient, forward what was pooled) */
struct VgPoolParams {
    struct VgView dst, src, forward;
    long long size[2], stride[2], padding[2];
    unsigned long long places; /* scratch: a long long for each window */
    unsigned average;
    unsigned covered; /* the average is over what the window covers, not over the window */
};

/* vg_upscale */
enum VgUpscale {
    VG_UPSCALE_NEAREST,
    VG_UPSCALE_BILINEAR,
    VG_UPSCALE_ANTIALIASED,
    VG_UPSCALE_BICUBIC,
};

struct VgUpscaleParams {
    struct VgView dst, src;
    float factor[4];
    float middle; /* of a pixel */
    unsigned op; /* enum VgUpscale */
};

/* vg_timestep_embedding */
struct VgTimestepParams {
    struct VgView dst, steps;
    long long half;
    float log_period;
    unsigned reserved;
};

/* vg_window: rows of dst are rows of src, or zeros. */
enum VgWindow {
    VG_WINDOW_PART,    /* `across` windows of `size` in a line */
    VG_WINDOW_UNPART,
    VG_WINDOW_REL_POS, /* row (k, q) is row q - k + n - 1 */
};

struct VgWindowParams {
    struct VgView dst, src;
    long long size, across;
    unsigned op; /* enum VgWindow */
    unsigned bytes; /* of an element */
};

/* vg_add_rel_pos: all dense f32; rows of n * n */
struct VgRelPosParams {
    struct VgView dst, a, w, h;
};

/* vg_ssm_conv */
struct VgSsmConvParams {
    struct VgView dst, x, kernel;
};

/* vg_ssm_scan: see the IR for what the sources are. */
struct VgSsmScanParams {
    struct VgView dst, s, x, dt, a, b, c, ids;
    struct VgFaultSite place;
    long long snapshots;
};

/* vg_linear_attention: RWKV 6 (with bonus) and gated linear attention. Sources are dense. */
struct VgLinearAttentionParams {
    struct VgView dst, k, v, r, bonus, decay, state;
    float scale;
    unsigned reserved;
};

/* vg_wkv7. Sources are dense. */
struct VgWkv7Params {
    struct VgView dst, r, w, k, v, a, b, state;
};

/* vg_delta_net */
struct VgDeltaNetParams {
    struct VgView dst, q, k, v, gate, beta, state;
    long long snapshots;
};

/* vg_solve_tri: a * dst = b, a lower triangular */
struct VgSolveTriParams {
    struct VgView dst, a, b;
};

/* vg_hc_comb: [to][from] of four streams, from mixes, scale and base. */
struct VgHcCombParams {
    struct VgView dst, mixes, scale, base;
    float eps;
    unsigned iterations;
};

/* vg_hc_pre: dst[:, t] = scale * sum of x[:, h, t] * w[h, t], or of x * sigmoid(w) */
struct VgHcPreParams {
    struct VgView dst, x, w;
    float scale;
    unsigned gated;
};

/* vg_hc_post: dst[:, d, t] = x[:, t] * post[d, t] + sum of residual[:, s, t] * comb[d, s, t] */
struct VgHcPostParams {
    struct VgView dst, x, residual, post, comb;
};

/* vg_indexer: dst[i, t, s] = sum of max(0, q[:, h, t, s] . k[:, i, s]) * w[h, t, s] + mask[i, t, s] */
struct VgIndexerParams {
    struct VgView dst, q, k, w, mask;
    unsigned long long codebooks;
};

/* vg_cross_entropy: -mean over rows of sum(log_softmax(a) * b), partial sums in scratch, then (`finish`) their sum.
 * vg_cross_entropy_back: the gradient, for the gradient behind it. */
struct VgCrossEntropyParams {
    struct VgView dst, a, b, gradient;
    unsigned long long scratch;
    unsigned parts;
    unsigned finish;
};

/* vg_adamw (w, gradient, m, v), vg_sgd (w, gradient): steps with the settings that lie in a tensor */
struct VgOptimizerParams {
    struct VgView dst, w, gradient, m, v, settings;
};

/* vg_upload: bytes from memory of the host to where they belong. `from` and `to` are equally far from a multiple of 16. */
struct VgUpload {
    unsigned long long to, from;
    unsigned long long len;
};

#define VG_MAX_UPLOADS 16

struct VgUploadParams {
    struct VgUpload puts[VG_MAX_UPLOADS];
};

/* vg_repack: blocks, as ggml has them, to planes. `quants` and `scales` are where those of the first block go; `from` and
 * `quants` are multiples of 16, and neither plane is where the blocks are. */
struct VgRepackParams {
    unsigned long long from, quants, scales;
    unsigned long long blocks;
    unsigned type;
    unsigned reserved;
};
