// Filters of rows, in the order of SciPy's sums. A row is one sequence of steps, because a state that skips steps by
// a power of a matrix loses the digits that keep poles inside of the unit circle.
typedef long long whole;

template <typename R> struct Complex {
    R re, im;
    __device__ Complex() : re(0), im(0) {}
    __device__ Complex(R re, R im) : re(re), im(im) {}
    template <typename S> __device__ Complex(Complex<S> z) : re((R)z.re), im((R)z.im) {}
    __device__ Complex operator+(Complex z) const { return Complex(re + z.re, im + z.im); }
    __device__ Complex operator-(Complex z) const { return Complex(re - z.re, im - z.im); }
    __device__ Complex operator*(Complex z) const { return Complex(re * z.re - im * z.im, re * z.im + im * z.re); }
};
typedef Complex<float> c64;
typedef Complex<double> c128;

// A chain of sections: `b` and `a` have order + 1 coefficients for each, and a[0] is 1. Steps of a chunk are computed
// section by section, so that its states and coefficients are in registers. An ORDER of 0 takes any order.
template <typename T, int ORDER>
__global__ void filter_rows(whole lines, whole count, int sections, int any, const T *b, const T *a, const T *x,
                            const T *state, T *out, T *last) {
    const int CHUNK = 16, KEPT = ORDER ? ORDER : 1;
    whole line = blockIdx.x * (whole)blockDim.x + threadIdx.x;
    if (line >= lines) return;
    const int order = ORDER ? ORDER : any;
    T *states = last + line * sections * order;
    for (int k = 0; k < sections * order; k++) states[k] = state[line * sections * order + k];
    x += line * count;
    out += line * count;
    for (whole first = 0; first < count; first += CHUNK) {
        T v[CHUNK];
        for (int i = 0; i < CHUNK; i++) v[i] = first + i < count ? x[first + i] : T();
        const int steps = count - first < CHUNK ? (int)(count - first) : CHUNK;
        for (int s = 0; s < sections; s++) {
            T own[KEPT], forth[KEPT + 1], back[KEPT + 1];
            const T *p = b + s * (order + 1), *q = a + s * (order + 1);
            if (ORDER) {
                for (int k = 0; k <= KEPT; k++) forth[k] = p[k], back[k] = q[k];
                for (int k = 0; k < KEPT; k++) own[k] = states[s * order + k];
                p = forth, q = back;
            }
            T *d = ORDER ? own : states + s * order;
            for (int i = 0; i < CHUNK; i++) {
                if (i >= steps) break;
                const T in = v[i], made = d[0] + in * p[0];
                for (int k = 1; k < order; k++) d[k - 1] = d[k] + in * p[k] - made * q[k];
                d[order - 1] = in * p[order] - made * q[order];
                v[i] = made;
            }
            if (ORDER)
                for (int k = 0; k < KEPT; k++) states[s * order + k] = own[k];
        }
        for (int i = 0; i < CHUNK; i++)
            if (i < steps) out[first + i] = v[i];
    }
}

// Taps alone: an element is a sum of its neighbours. The last elements of the convolution are the states.
template <typename T, typename Wide>
__global__ void filter_taps(whole lines, whole count, int order, const T *b, const T *x, const T *state, T *out,
                            T *last) {
    whole item = blockIdx.x * (whole)blockDim.x + threadIdx.x, length = count + order;
    if (item >= lines * length) return;
    whole line = item / length, n = item % length;
    Wide sum = Wide();
    for (whole k = n < count ? 0 : n - count + 1; k <= order && k <= n; k++)
        sum = sum + (Wide)b[k] * (Wide)x[line * count + n - k];
    if (n < order) sum = sum + (Wide)state[line * order + n];
    (n < count ? out + line * count + n : last + line * order + n - count)[0] = (T)sum;
}
