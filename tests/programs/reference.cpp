// A reference for the operations that ggml's CPU backend cannot compute, in double precision.
//
// test-backend-ops compares a backend with the first CPU device. Preloaded into test-backend-ops,
// this library is that device. The library supports only the cases that ggml's CPU backend does not
// support, so that a run with the library and a run without it cover every case that has a
// reference.
// Neither supports floats written to the codebook formats (IQ1, IQ2, IQ3), for which many results
// are right.

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// The elements of a tensor as doubles, in order.
class Values {
  public:
    explicit Values(const ggml_tensor * t)
        : ne0(t->ne[0]), ne1(t->ne[1]), ne2(t->ne[2]), ne3(t->ne[3]) {
        values.resize(ne0 * ne1 * ne2 * ne3);
        std::vector<float> row(ne0);
        for (int64_t i3 = 0; i3 < ne3; i3++) {
            for (int64_t i2 = 0; i2 < ne2; i2++) {
                for (int64_t i1 = 0; i1 < ne1; i1++) {
                    const size_t offset = i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
                    read_row(t, (const char *) t->data + offset, row);
                    for (int64_t i0 = 0; i0 < ne0; i0++) {
                        values[index(i0, i1, i2, i3)] = row[i0];
                    }
                }
            }
        }
    }

    double operator()(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
        return values[index(i0, i1, i2, i3)];
    }

    const int64_t ne0, ne1, ne2, ne3;

  private:
    size_t index(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
        return ((i3 * ne2 + i2) * ne1 + i1) * ne0 + i0;
    }

    static void read_row(const ggml_tensor * t, const char * from, std::vector<float> & row) {
        if (ggml_is_quantized(t->type)) {
            ggml_get_type_traits(t->type)->to_float(from, row.data(), row.size());
            return;
        }
        for (size_t i = 0; i < row.size(); i++) {
            const char * element = from + i * t->nb[0];
            switch (t->type) {
                case GGML_TYPE_F32:  row[i] = *(const float *) element; break;
                case GGML_TYPE_F16:
                    row[i] = ggml_fp16_to_fp32(*(const ggml_fp16_t *) element);
                    break;
                case GGML_TYPE_BF16:
                    row[i] = ggml_bf16_to_fp32(*(const ggml_bf16_t *) element);
                    break;
                case GGML_TYPE_I32:  row[i] = (float) *(const int32_t *) element; break;
                default: GGML_ABORT("no reference reads %s", ggml_type_name(t->type));
            }
        }
    }

    std::vector<double> values;
};

// Sets every element of an F32 tensor.
template <typename F> void write(ggml_tensor * t, F value) {
    for (int64_t i3 = 0; i3 < t->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < t->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
                    char * to = (char *) t->data + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2]
                        + i3 * t->nb[3];
                    *(float *) to = (float) value(i0, i1, i2, i3);
                }
            }
        }
    }
}

// dst[m, n] = sum over k of a[k, m] * b[k, n], for each matrix of b. The matrices of a repeat.
void mul_mat(ggml_tensor * dst) {
    const Values a(dst->src[0]), b(dst->src[1]);
    write(dst, [&](int64_t m, int64_t n, int64_t i2, int64_t i3) {
        double sum = 0;
        for (int64_t k = 0; k < a.ne0; k++) {
            sum += a(k, m, i2 / (b.ne2 / a.ne2), i3 / (b.ne3 / a.ne3)) * b(k, n, i2, i3);
        }
        return sum;
    });
}

// dst[m, n] = sum over k of a[m, k] * b[n, k], for each matrix of b. The matrices of a repeat.
void out_prod(ggml_tensor * dst) {
    const Values a(dst->src[0]), b(dst->src[1]);
    write(dst, [&](int64_t m, int64_t n, int64_t i2, int64_t i3) {
        double sum = 0;
        for (int64_t k = 0; k < a.ne1; k++) {
            sum += a(m, k, i2 / (b.ne2 / a.ne2), i3 / (b.ne3 / a.ne3)) * b(n, k, i2, i3);
        }
        return sum;
    });
}

// dst[x, y, oc, n] = sum over the kernel [kw, kh, channels, oc] applied to the padded image. The
// outer loop is over the kernel, because some images are large.
void conv_2d(ggml_tensor * dst) {
    const Values kernel(dst->src[0]), image(dst->src[1]);
    int32_t p[6]; // strides, paddings, dilations
    memcpy(p, dst->op_params, sizeof(p));
    const int64_t width = dst->ne[0], height = dst->ne[1];
    std::vector<double> sums(width * height);
    for (int64_t n = 0; n < dst->ne[3]; n++) {
        for (int64_t oc = 0; oc < dst->ne[2]; oc++) {
            std::fill(sums.begin(), sums.end(), 0.0);
            for (int64_t i = 0; i < kernel.ne0 * kernel.ne1 * kernel.ne2; i++) {
                const int64_t kx = i % kernel.ne0, ky = i / kernel.ne0 % kernel.ne1,
                    c = i / (kernel.ne0 * kernel.ne1);
                const double  k = kernel(kx, ky, c, oc);
                for (int64_t oy = 0; oy < height; oy++) {
                    const int64_t y = oy * p[1] - p[3] + ky * p[5];
                    if (y < 0 || y >= image.ne1) {
                        continue;
                    }
                    for (int64_t ox = 0; ox < width; ox++) {
                        const int64_t x = ox * p[0] - p[2] + kx * p[4];
                        if (x >= 0 && x < image.ne0) {
                            sums[oy * width + ox] += k * image(x, y, c, n);
                        }
                    }
                }
            }
            for (int64_t i = 0; i < width * height; i++) {
                char * to = (char *) dst->data + i % width * dst->nb[0] + i / width * dst->nb[1]
                    + oc * dst->nb[2] + n * dst->nb[3];
                *(float *) to = (float) sums[i];
            }
        }
    }
}

// dst[:, ids[i]] += grad[:, i], from zero.
void get_rows_back(ggml_tensor * dst) {
    const Values grad(dst->src[0]), ids(dst->src[1]);
    write(dst, [&](int64_t i0, int64_t row, int64_t, int64_t) {
        double sum = 0;
        for (int64_t i = 0; i < ids.ne0; i++) {
            if ((int64_t) ids(i, 0, 0, 0) == row) {
                sum += grad(i0, i, 0, 0);
            }
        }
        return sum;
    });
}

// The gradient of y = softmax(scale * x + bias): scale * y * (dy - sum of y * dy). ALiBi is a bias
// and does not depend on x.
void soft_max_back(ggml_tensor * dst) {
    const Values dy(dst->src[0]), y(dst->src[1]);
    float scale;
    memcpy(&scale, dst->op_params, sizeof(scale));
    write(dst, [&](int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
        double dot = 0;
        for (int64_t i = 0; i < y.ne0; i++) {
            dot += y(i, i1, i2, i3) * dy(i, i1, i2, i3);
        }
        return scale * y(i0, i1, i2, i3) * (dy(i0, i1, i2, i3) - dot);
    });
}

// Blocks of one type, in order.
void copy(ggml_tensor * dst) {
    const ggml_tensor * src    = dst->src[0];
    const size_t        size   = ggml_type_size(dst->type);
    const int64_t       blocks = ggml_nelements(dst) / ggml_blck_size(dst->type);
    const auto place = [](const ggml_tensor * t, int64_t i) {
        const int64_t row = t->ne[0] / ggml_blck_size(t->type);
        return (char *) t->data + i % row * t->nb[0] + i / row % t->ne[1] * t->nb[1] +
               i / (row * t->ne[1]) % t->ne[2] * t->nb[2] +
               i / (row * t->ne[1] * t->ne[2]) * t->nb[3];
    };
    for (int64_t i = 0; i < blocks; i++) {
        memcpy(place(dst, i), place(src, i), size);
    }
}

using Operation = void (*)(ggml_tensor * dst);

// The function that computes the tensor; null if there is none.
Operation operation(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_MUL_MAT:       return mul_mat;
        case GGML_OP_OUT_PROD:      return out_prod;
        case GGML_OP_CONV_2D:       return conv_2d;
        case GGML_OP_GET_ROWS_BACK: return get_rows_back;
        case GGML_OP_SOFT_MAX_BACK: return soft_max_back;
        case GGML_OP_CPY:
        case GGML_OP_CONT:          return t->type == t->src[0]->type ? copy : nullptr;
        default:                    return nullptr;
    }
}

bool computes_nothing(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE ||
           t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

// The backend: a CPU device with memory of this process.

const char * name() { return "REFERENCE"; }

ggml_status compute(ggml_backend_t, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * t = ggml_graph_node(graph, i);
        if (computes_nothing(t)) {
            continue;
        }
        const Operation compute = operation(t);
        if (compute == nullptr) {
            return GGML_STATUS_FAILED;
        }
        compute(t);
    }
    return GGML_STATUS_SUCCESS;
}

bool supports(ggml_backend_dev_t, const ggml_tensor * t) {
    static ggml_backend_dev_t cpu = ggml_backend_dev_by_name("CPU");
    if (computes_nothing(t) || t->op == GGML_OP_CONT) { // CONT prepares operands of other nodes
        return true;
    }
    return operation(t) != nullptr && !ggml_backend_dev_supports_op(cpu, t);
}

ggml_backend_reg_t registry();

ggml_backend_t new_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = { 'v', 'g', 'p', 'u', '-', 'r', 'e', 'f',
                              'e', 'r', 'e', 'n', 'c', 'e', 0,   1 };
    ggml_backend_i   iface{};
    iface.get_name      = [](ggml_backend_t) { return name(); };
    iface.free          = [](ggml_backend_t backend) { delete backend; };
    iface.graph_compute = compute;
    return new ggml_backend{ &guid, iface, dev, nullptr };
}

ggml_backend_dev_t device() {
    static ggml_backend_device device = [] {
        ggml_backend_device_i iface{};
        iface.get_name        = [](ggml_backend_dev_t) { return name(); };
        iface.get_description = [](ggml_backend_dev_t) { return "double precision"; };
        iface.get_memory      = [](ggml_backend_dev_t, size_t * free, size_t * total) {
            *free = *total = 0;
        };
        iface.get_type        = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_CPU; };
        iface.get_props       = [](ggml_backend_dev_t, ggml_backend_dev_props * props) {
            *props             = {};
            props->name        = name();
            props->description = "double precision";
            props->type        = GGML_BACKEND_DEVICE_TYPE_CPU;
        };
        iface.init_backend    = new_backend;
        iface.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
        iface.supports_op     = supports;
        iface.supports_buft   = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
            return ggml_backend_buft_is_host(type);
        };
        return ggml_backend_device{ iface, registry(), nullptr };
    }();
    return &device;
}

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = [] {
        ggml_backend_reg_i iface{};
        iface.get_name         = [](ggml_backend_reg_t) { return name(); };
        iface.get_device_count = [](ggml_backend_reg_t) -> size_t { return 1; };
        iface.get_device       = [](ggml_backend_reg_t, size_t) { return device(); };
        return ggml_backend_reg{ GGML_BACKEND_API_VERSION, iface, nullptr };
    }();
    return &reg;
}

// Runs before the program loads a backend, because the program compares with the first one.
__attribute__((constructor)) void be_the_first() {
    ggml_backend_register(registry());
}

} // namespace
