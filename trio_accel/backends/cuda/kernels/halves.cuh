// Numbers of two bytes, which are computed in longer types and rounded once.

struct Half {
    unsigned short bits;
};

struct Bfloat {
    unsigned short bits;
};

__device__ float wide(float value) { return value; }
__device__ double wide(double value) { return value; }
__device__ float wide(Bfloat value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ float wide(Half value)
{
    const unsigned sign = (unsigned)(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    if (rest >= 0x7c00)
        return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400)
        return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
    const float size = (float)rest * 0x1p-24f;
    return sign ? -size : size;
}

__device__ void narrow(float value, float &out) { out = value; }
__device__ void narrow(double value, double &out) { out = value; }
// To the nearest, and of two to the even one.
__device__ void narrow(float value, Bfloat &out)
{
    const unsigned bits = __float_as_uint(value);
    out.bits = (unsigned short)(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
__device__ void narrow(float value, Half &out)
{
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    unsigned code;
    if (value != value)
        code = 0x7e00;
    else if (size >= 0x47800000)
        code = 0x7c00;
    else if (size < 0x38800000)
        code = (unsigned)rintf(__uint_as_float(size) * 0x1p24f);
    else
        code = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    out.bits = (unsigned short)(sign | code);
}
