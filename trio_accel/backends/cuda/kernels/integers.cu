// Products of whole numbers: exact, and modulo two to the power of their bits, as NumPy's are.

enum { AXES = 64 };

struct MultiplyArguments {
    const char *a, *b;
    char *out;
    i64 count, rows, columns, inner;
    i64 a_row, a_inner, b_inner, b_column;
    int itemsize, ndim;
    i64 shape[AXES], a_strides[AXES], b_strides[AXES];
};

// Signs do not matter: the lower bits of a product are those of the operands' lower bits.
template <typename Element>
__device__ void multiply_element(const MultiplyArguments &arguments, const char *a, const char *b, i64 place)
{
    u64 sum = 0;
    for (i64 inner = 0; inner < arguments.inner; inner++) {
        sum += (u64) * (const Element *)a * (u64) * (const Element *)b;
        a += arguments.a_inner;
        b += arguments.b_inner;
    }
    ((Element *)arguments.out)[place] = (Element)sum;
}

// One thread for each element of a result in C order, with batches of any strides.
KERNEL(multiply, MultiplyArguments)
{
    EACH(place, arguments.count) {
        i64 rest = place / arguments.columns;
        const char *b = arguments.b + (place - rest * arguments.columns) * arguments.b_column;
        i64 batch = rest / arguments.rows;
        const char *a = arguments.a + (rest - batch * arguments.rows) * arguments.a_row;
        for (int axis = arguments.ndim - 1; axis >= 0; axis--) {
            rest = batch / arguments.shape[axis];
            const i64 within = batch - rest * arguments.shape[axis];
            a += within * arguments.a_strides[axis];
            b += within * arguments.b_strides[axis];
            batch = rest;
        }
        switch (arguments.itemsize) {
        case 1: multiply_element<unsigned char>(arguments, a, b, place); break;
        case 2: multiply_element<unsigned short>(arguments, a, b, place); break;
        case 4: multiply_element<unsigned>(arguments, a, b, place); break;
        default: multiply_element<u64>(arguments, a, b, place); break;
        }
    }
}
