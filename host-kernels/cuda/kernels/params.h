/* Kernel parameters. Three compilers read this file: NVRTC (or nvcc), the C++ compiler of the CPU
 * shim, and bindgen, which generates the same structures for Rust. The file is plain C without
 * includes. Structures have no padding because the host passes them as bytes. */
#pragma once

/* Element types. The ids are the wire ids (`Type` of vgpu-transport), which are those of `enum
 * ggml_type` in ggml.h. */
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

/* Flag in the type id of repacked weights (structure of arrays): the quants of all blocks of a
 * matrix (ne[0] by ne[1], contiguous), then the block scales in the same order. `repack.cu`
 * defines which bytes of a block are quants and scale. The size in bytes does not change, and
 * strides remain those of ggml's type. */
#define VG_REPACKED 0x100

/* A tensor: address of the first element, lengths (ne[0] is the fastest) and strides in bytes, as
 * in `struct ggml_tensor`. For quantised types nb[0] is the size of a block. `data` is 0 for an
 * absent tensor. */
struct VgView {
    unsigned long long data;
    long long ne[4];
    long long nb[4];
    unsigned type;
    unsigned reserved;
};

/* The codebooks (grids) of the IQ formats, 8 bytes an entry (IQ3: 4). A byte is magnitude + 64;
 * for IQ1 a byte is 8 * value + 15. */
struct VgCodebooks {
    unsigned long long iq2_xxs[256];
    unsigned long long iq2_xs[512];
    unsigned long long iq2_s[1024];
    unsigned long long iq3_xxs[256];
    unsigned long long iq3_s[512];
    unsigned long long iq1[2048];
};

/* Report of an index in tensor data that is out of bounds. The first thread to set `taken` writes
 * the other fields. */
struct VgFault {
    unsigned taken;
    unsigned node; /* index in the graph */
    long long index;
    long long count;
};

/* Where a kernel reports a fault, and the graph node that the kernel belongs to. */
struct VgFaultSite {
    unsigned long long fault; /* VgFault * */
    unsigned node;
    unsigned reserved;
};

/* vg_elementwise: dst[i] = f(a[i], b[i]); a and b are broadcast (repeated) over dst. */
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
    /* Gated linear units: f(a) * b. */
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
    unsigned flat; /* all present operands are f32, contiguous and of equal lengths */
};

/* vg_add_id: dst[:, u, t] = a[:, u, t] + b[:, ids[u, t]]. */
struct VgAddIdParams {
    struct VgView dst, a, b, ids;
    struct VgFaultSite site;
};

/* vg_copy: the elements of src in order, converted to the type of dst. */
struct VgCopyParams {
    struct VgView dst, src;
    unsigned long long codebooks; /* VgCodebooks * */
};

/* vg_move: dst[i] = src[f(i)]. Copies elements of `size` bytes unchanged; for quantised types an
 * element is a block, and dimension 0 counts blocks. */
enum VgMove {
    VG_MOVE_REPEAT,   /* i modulo the lengths of src */
    VG_MOVE_PAD,      /* i - shift; 0 outside src */
    VG_MOVE_CIRCULAR, /* i - shift modulo the lengths of src */
    VG_MOVE_REFLECT,  /* i - shift, reflected at the ends of dimension 0 */
    VG_MOVE_DIAG,     /* src[i1] where i0 = i1, 0 elsewhere */
    VG_MOVE_BAND,     /* i where low <= i0 - i1 < high, `other` elsewhere */
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

/* vg_repeat_back: sum over the repetitions */
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
    struct VgFaultSite site;
};

/* vg_norm: the function applied to each row. */
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
    long long channels; /* channels in a group */
    float eps;
    unsigned reserved;
};

/* vg_soft_max */
struct VgSoftMaxParams {
    struct VgView dst, src, mask, sinks;
    float scale, max_bias;
    unsigned heads_log2; /* largest power of two <= number of heads (ALiBi) */
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
    unsigned heads; /* heads of a token that a block rotates */
    unsigned reserved;
};

/* vg_rope_rows: vg_rope fused with SET_ROWS. The heads of a token are concatenated into row
 * ids[token] of `cache`. rope.dst is not written. */
struct VgRopeRowsParams {
    struct VgRopeParams rope;
    struct VgView cache, ids;
    struct VgFaultSite site;
};

/* vg_rope_cache: a vg_rope, a vg_rope_rows and a vg_set_rows that do not depend on each other, in
 * this order. Each has this number of blocks, or 0 if it is absent. */
struct VgRopeCacheParams {
    struct VgRopeParams query;
    struct VgRopeRowsParams key;
    struct VgRowsParams value;
    unsigned query_blocks, key_blocks, value_blocks;
    unsigned reserved;
};

/* vg_norm_fused: x = a + add, stored in sum; dst = x / sqrt(mean(x^2) + eps) * w; and dst
 * quantised as vg_quantize_q8 does. Absent operands have address 0. Rows of add and w are
 * broadcast. All tensors are f32 with contiguous rows at multiples of 16 bytes. */
struct VgNormFusedParams {
    struct VgView dst, a, add, sum, w;
    unsigned long long quants, scales;
    float eps;
    unsigned has_constant_factors; /* whether no launch of the graph writes `w` */
};

/* vg_topk_moe: MoE routing. The top-k experts of each token in descending order, and their
 * weights. */
enum VgGating {
    VG_GATING_SOFT_MAX,
    VG_GATING_SIGMOID,
    VG_GATING_LOGITS, /* top-k of the logits; weights are the softmax of the selected logits */
};

struct VgTopkMoeParams {
    /* [experts, tokens], [>= used, tokens], [1, used, tokens] */
    struct VgView logits, ids, weights;
    unsigned long long bias; /* f32 for each expert, added for the selection only; or 0 */
    float min_sum; /* lower bound of the sum that weights are divided by */
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
    unsigned columns; /* vg_argsort: a power of two >= src.ne[0] */
    unsigned long long scratch;
};

/* vg_sum, vg_count_equal: a first launch writes partial sums to scratch, a second one (`finish`)
 * adds them. */
struct VgTotalParams {
    struct VgView dst, a, b;
    unsigned long long scratch;
    unsigned parts;
    unsigned finish;
};

/* vg_mul_mat, vg_mul_vec: dst[i, j, b] = sum over k of w[k, i, b / r] * x[k, j, b], b counting
 * dimensions 2 and 3. vg_mul_mat_id: dst[i, u, t] = sum over k of w[k, i, ids[u, t]] * x[k, u
 * modulo its length, t]. vg_out_prod: dst[i, j, b] = sum over k of w[i, k, b / r] * x[j, k, b]. */
struct VgMulMatParams {
    struct VgView dst, w, x, ids;
    unsigned long long codebooks;
    struct VgFaultSite site;
};

/* vg_quantize_q8: rows of src quantised in blocks of 32. `quants` holds 32 int8 per block;
 * `scales` four floats per block: the scale, and scale * (sum of quants) of the block and of its
 * halves. `q8_layout.cuh` defines the order. */
struct VgQuantizeQ8Params {
    struct VgView src;
    unsigned long long quants, scales;
};

/* A matrix, its result, and an optional bias `add`: of the lengths of dst, or one row for all
 * columns; with expert ids one row for each expert. */
struct VgProduct {
    struct VgView dst, w, add;
};

/* vg_mmv_*, vg_mmv_*_cols8: vg_mul_vec, a block for at most eight columns (blockIdx.y), or with ids
 * vg_mul_mat_id.
 * Activations come from vg_quantize_q8, or are f32 in x if weights are floats. Up to three
 * matrices share the activations. With a gated unit there are two, and the result unit(first) *
 * second goes to the first dst. */
struct VgMmvParams {
    struct VgProduct products[3];
    struct VgView x, ids;
    unsigned long long quants, scales;
    unsigned long long codebooks;
    struct VgFaultSite site;
    long long slots; /* length of dimension 1 of the activations */
    float c[2];
    unsigned count; /* number of products */
    unsigned unit;  /* enum VgElementwiseOp: the gated unit, or VG_OP_ADD for none */
    unsigned has_constant_weights; /* whether no launch of the graph writes the weights */
    unsigned splits_rows; /* whether warps of a block share a pair of rows, of 4 tiles or more */
};

/* A column of a joint launch: its activations, as for vg_mmv_* (floats: x is the row), and the
 * first element of its column in each result, and of its bias (0: none). */
struct VgMmvColumn {
    unsigned long long x; /* floats, or the quants of vg_quantize_q8 */
    unsigned long long scales;
    unsigned long long dst[3], add[3];
};

/* Maximum number of columns of a joint launch. The parameters of a kernel have 4 KiB. */
enum { VG_JOINT_COLUMNS = 32 };

/* vg_mmv_*_joint: the product `of` for columns of several plans, a block for at most eight
 * (blockIdx.y). `of` is of one of the plans. Its weights, lengths and element strides are those of
 * all; its addresses of activations, results and biases do not count. There are no ids. */
struct VgMmvJointParams {
    struct VgMmvParams of;
    unsigned columns;
    unsigned reserved;
    struct VgMmvColumn column[VG_JOINT_COLUMNS];
};

/* vg_megakernel, vg_megakernel_cols8: the operation of a stage, which is what a launch of another
 * kernel would do. */
enum VgStageOp {
    VG_STAGE_MMV, /* vg_mmv_* */
    VG_STAGE_NORM_FUSED,
    VG_STAGE_QUANTIZE_Q8,
    VG_STAGE_ROPE,
    VG_STAGE_ROPE_ROWS,
    VG_STAGE_SET_ROWS,
    VG_STAGE_SET_BLOCKS, /* vg_set_rows into rows of a quantised type */
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

/* Maximum number of stages that a stage waits for. */
enum { VG_MAX_WAITS = 6 };

/* Stride in bytes of the stage table: a VgStage, then the parameters of the stage's kernel. */
enum { VG_STAGE_BYTES = 1152 };

/* Stride of the counters in 32-bit words: each counter has a cache line of its own. */
enum { VG_COUNTER_STRIDE = 32 };

/* A stage, and the number of blocks that increment its counter. */
struct VgWait {
    unsigned stage;
    unsigned count;
};

struct VgStage {
    unsigned op;      /* enum VgStageOp */
    unsigned type;    /* MMV: type of the weights */
    unsigned grid[3]; /* grid of the launch; MMV: pairs of rows, slots, tokens or batches */
    unsigned total;   /* work items; MMV: blocks with a pair for each warp */
    unsigned first;   /* block of the megakernel that does the first item */
    unsigned waits;   /* used entries of wait */
    struct VgWait wait[VG_MAX_WAITS];
    unsigned next;      /* index of the next MMV stage, or the number of stages */
    /* MMV: 1 + the stage that a block must have started before it may fetch weights; or 0 */
    unsigned from;
    unsigned next_stage_bytes; /* size of the next stage with its parameters */
    unsigned reserved;
};

struct VgMegakernelParams {
    unsigned long long table;    /* `stages` entries of VG_STAGE_BYTES */
    /* counters of finished blocks: of the launch, then of each stage; 0 before and after */
    unsigned long long counters;
    unsigned stages;
    unsigned products;  /* index of the first MMV stage, or `stages` */
    unsigned first_stage_bytes; /* size of the first stage with its parameters */
    unsigned ring;      /* bytes of shared memory for weights in flight, for each warp */
};

/* vg_convert_f16: rows of src as f16 (`is_bf16`: as bf16), each padded with zeros to a multiple of
 * 64, and a scale for each row. vg_split_bf16: as two bf16 terms, without scales. */
struct VgConvertF16Params {
    struct VgView src;
    unsigned long long values, row_scales;
    unsigned long long codebooks;
    unsigned is_bf16;
    unsigned reserved;
};

/* vg_moe_sort: sorts the slots of all tokens by expert. `moe_order` receives, for each expert and
 * the end, the index of its first slot; the same counted in tiles of columns; then the sorted list
 * of token * slots + slot. */
struct VgMoeSortParams {
    struct VgView ids;
    /* unsigned[2 * (experts + 1) + slots * tokens + (align - 1) * experts] */
    unsigned long long moe_order;
    struct VgFaultSite site;
    unsigned experts;
    unsigned columns; /* columns of a tile */
    unsigned align;   /* each expert's slots begin at a multiple of it; unused entries are ~0 */
    unsigned reserved;
};

/* vg_gemm_*: vg_mul_mat, or with moe_order vg_mul_mat_id, with activations from vg_convert_f16. */
struct VgGemmParams {
    struct VgView dst, w;
    unsigned long long values, row_scales;
    unsigned long long codebooks;
    unsigned long long moe_order;
    long long slots; /* length of dimension 1 of the activations */
};

/* vg_convert_f16_sm90: vg_convert_f16 for vg_gemm_sm90_*. The output is a sequence of k steps of
 * 64 elements; a step has `rows` rows of 128 bytes, permuted and swizzled as wgmma reads them
 * (gemm_sm90.cuh). Rows are those of src, each batch (dimensions 2 and 3) padded to `padded` rows;
 * or, with moe_order, in that order. */
struct VgConvertF16Sm90Params {
    struct VgView src;
    unsigned long long values, row_scales;
    unsigned long long moe_order;
    long long rows, padded;
    unsigned experts;
    unsigned slots; /* slots of a token in moe_order */
    unsigned is_bf16;
    unsigned steps;
};

/* vg_gemm_sm90_*: vg_gemm_* with activations from vg_convert_f16_sm90. */
struct VgGemmSm90Params {
    struct VgView dst, w;
    unsigned long long values, row_scales;
    unsigned long long moe_order;
    long long rows, padded;
};

/* vg_gemm_sm90_*_16, _32, _64: vg_gemm_sm90_* with at most so many columns, without experts. */
struct VgGemmSm90FewParams {
    struct VgView dst, w;
    unsigned long long values, row_scales;
    unsigned long long partials; /* scratch: partial results of each split */
    unsigned long long counters; /* finished splits of each tile of rows; 0 before and after */
    long long rows, padded;
    unsigned splits;               /* blocks that share K */
    unsigned has_constant_weights; /* whether no launch of the graph writes the weights */
};

/* vg_fattn_simt: FLASH_ATTN_EXT for any type and layout. */
struct VgFattnSimtParams {
    struct VgView dst, q, k, v, mask, sinks;
    unsigned long long codebooks;
    float scale, logit_softcap, max_bias;
    unsigned heads_log2; /* largest power of two <= number of heads (ALiBi) */
};

/* vg_fattn_*: vg_fattn_simt on tensor cores. The gqa_ratio query heads that share a KV head, times
 * the tokens, are the rows of a tile. */
struct VgFattnParams {
    struct VgView dst, q, k, v, mask, sinks;
    unsigned long long mask_tiles; /* from vg_fattn_mask_tiles, or 0 */
    unsigned long long partials;   /* scratch: partial results of each split */
    unsigned long long counters; /* finished splits of each tile of rows; 0 before and after */
    unsigned long long codebooks;
    /* dst quantised as by vg_quantize_q8 if quants is not 0; dst is contiguous then */
    unsigned long long quants, scales;
    float scale, logit_softcap, max_bias;
    unsigned heads_log2; /* largest power of two <= number of heads (ALiBi) */
    unsigned gqa_ratio;
    unsigned splits; /* blocks that share the KV positions of a tile of rows */
    unsigned quant_stride; /* row stride in bytes of quantised K and V in shared memory */
    unsigned reserved;
};

/* vg_fattn_mask_tiles: a byte (enum MaskState) for each tile of KV positions (fastest), tile of
 * rows, and dimensions 2 and 3 of the mask. */
struct VgFattnMaskTilesParams {
    struct VgView mask;
    unsigned long long mask_tiles;
    int keys, tokens;
    unsigned gqa_ratio;
    unsigned rows, columns; /* of a tile */
    unsigned reserved;
};

/* Input, kernel or output of a convolution: up to three spatial dimensions; channels (of a kernel:
 * input channels) and images (of a kernel: output channels), with their strides in bytes. */
struct VgVolume {
    unsigned long long data;
    long long ne[3];
    long long nb[3];
    long long channel, image;
    unsigned type;
    unsigned reserved;
};

/* Convolution parameters of each spatial dimension. */
struct VgConvGeometry {
    long long stride[3], padding[3], dilation[3];
};

/* vg_conv, vg_conv_depthwise, vg_conv_transposed */
struct VgConvParams {
    struct VgVolume dst, kernel, image;
    struct VgConvGeometry geometry;
    long long channels, results, images;
};

/* vg_im2col: dst[k, x, y, z + depth * n] is tap k of the patch at (x, y, z) of image n.
 * vg_im2col_back: each pixel is the sum of its occurrences in the patches. */
struct VgIm2colParams {
    struct VgView patches;
    struct VgVolume image;
    struct VgConvGeometry geometry;
    long long taps[3]; /* lengths of the kernel */
    long long channels, images, depth;
};

/* vg_col2im_1d */
struct VgCol2imParams {
    struct VgView dst, src;
    long long stride, padding;
};

/* vg_pool; vg_pool_argmax and vg_pool_back (src is the gradient, forward the pooled input) */
struct VgPoolParams {
    struct VgView dst, src, forward;
    long long size[2], stride[2], padding[2];
    unsigned long long argmax; /* scratch: a long long for each window */
    unsigned average;
    unsigned covered; /* divide by the number of covered elements, not by the size of the window */
    unsigned adds; /* vg_pool_back: dst has the sums over earlier windows */
    unsigned reserved;
};

/* The results, the tokens of each sequence, or the rows, that a launch computes. Earlier launches
 * have computed those before `begin`. */
struct VgRange {
    long long begin, end;
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
    struct VgRange results;
    float factor[4];
    float middle; /* pixel offset: 0.5, or 0 with aligned corners */
    unsigned op; /* enum VgUpscale */
};

/* vg_timestep_embedding */
struct VgTimestepParams {
    struct VgView dst, steps;
    long long half;
    float log_period;
    unsigned reserved;
};

/* vg_window: each row of dst is a row of src, or zeros. */
enum VgWindow {
    VG_WINDOW_PART,    /* windows of `size`, `across` of them in a line */
    VG_WINDOW_UNPART,
    VG_WINDOW_REL_POS, /* row (k, q) is row q - k + n - 1 */
};

struct VgWindowParams {
    struct VgView dst, src;
    long long size, across;
    unsigned op; /* enum VgWindow */
    unsigned bytes; /* size of an element */
};

/* vg_add_rel_pos: contiguous f32; rows of n * n */
struct VgRelPosParams {
    struct VgView dst, a, w, h;
};

/* vg_ssm_conv */
struct VgSsmConvParams {
    struct VgView dst, x, kernel;
};

/* vg_ssm_scan: the sources are those of Op::SsmScan in the IR. */
struct VgSsmScanParams {
    struct VgView dst, s, x, dt, a, b, c, ids;
    struct VgFaultSite site;
    long long snapshots;
    struct VgRange tokens;
};

/* vg_linear_attention: RWKV6 (with bonus) and gated linear attention. Sources are contiguous. */
struct VgLinearAttentionParams {
    struct VgView dst, k, v, r, bonus, decay, state;
    struct VgRange tokens;
    float scale;
    unsigned reserved;
};

/* vg_wkv7: sources are contiguous. */
struct VgWkv7Params {
    struct VgView dst, r, w, k, v, a, b, state;
    struct VgRange tokens;
};

/* vg_delta_net */
struct VgDeltaNetParams {
    struct VgView dst, q, k, v, gate, beta, state;
    long long snapshots;
    struct VgRange tokens;
};

/* vg_solve_tri: a * dst = b, a is lower triangular. Rows before `rows` are solved. */
struct VgSolveTriParams {
    struct VgView dst, a, b;
    struct VgRange rows;
};

/* vg_hc_comb: [to][from] of four streams, from mixes, scale and base. */
struct VgHcCombParams {
    struct VgView dst, mixes, scale, base;
    float eps;
    unsigned iterations;
};

/* vg_hc_pre: dst[:, t] = scale * sum over h of x[:, h, t] * w[h, t], or of x * sigmoid(w) */
struct VgHcPreParams {
    struct VgView dst, x, w;
    float scale;
    unsigned gated;
};

/* vg_hc_post: dst[:, d, t] = x[:, t] * post[d, t] + sum over s of residual[:, s, t] * comb[d, s,
 * t] */
struct VgHcPostParams {
    struct VgView dst, x, residual, post, comb;
};

/* vg_indexer: dst[i, t, s] = sum over h of max(0, q[:, h, t, s] . k[:, i, s]) * w[h, t, s], +
 * mask[i, t, s] */
struct VgIndexerParams {
    struct VgView dst, q, k, w, mask;
    unsigned long long codebooks;
};

/* vg_cross_entropy: -mean over rows of sum(log_softmax(a) * b). A first launch writes partial sums
 * to scratch, a second one (`finish`) adds them. vg_cross_entropy_back: its gradient times
 * `gradient`. */
struct VgCrossEntropyParams {
    struct VgView dst, a, b, gradient;
    unsigned long long scratch;
    unsigned parts;
    unsigned finish;
};

/* vg_adamw (w, gradient, m, v), vg_sgd (w, gradient): hyperparameters lie in the tensor
 * `settings`. */
struct VgOptimizerParams {
    struct VgView dst, w, gradient, m, v, settings;
};

/* vg_upload: copies from pinned host memory. `from` and `to` are equal modulo 16. */
struct VgUpload {
    unsigned long long to, from;
    unsigned long long len;
};

#define VG_MAX_UPLOADS 16

struct VgUploadParams {
    struct VgUpload uploads[VG_MAX_UPLOADS];
};

/* vg_repack: blocks in ggml's layout to repacked ones. `quants` and `scales` are the destinations
 * of the first block. `from` and `quants` are multiples of 16 bytes and do not overlap. */
struct VgRepackParams {
    unsigned long long from, quants, scales;
    unsigned long long blocks;
    unsigned type;
    unsigned reserved;
};
