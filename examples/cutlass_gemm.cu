// out = max(0, x @ weight + bias) of halves in rows, with sums in float: a product of CUTLASS with a fused
// epilogue. Its parameters are made in the kernel, so that the launch passes pointers and integers only.
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination_relu.h>
#include <cutlass/gemm/kernel/default_gemm.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>

using Half = cutlass::half_t;
using Rows = cutlass::layout::RowMajor;
using Tile = cutlass::gemm::GemmShape<128, 256, 32>;
using Warp = cutlass::gemm::GemmShape<64, 64, 32>;
using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
using Epilogue = cutlass::epilogue::thread::LinearCombinationRelu<Half, 8, float, float>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
constexpr int kStages = 3;
using Gemm = typename cutlass::gemm::kernel::DefaultGemm<
    Half, Rows, 8, Half, Rows, 8, Half, Rows, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile,
    Warp, Instruction, Epilogue, Swizzle, kStages, false, cutlass::arch::OpMultiplyAdd>::GemmKernel;
static_assert(Gemm::kThreadCount == THREADS && sizeof(Gemm::SharedStorage) <= SHARED_BYTES);

extern "C" __global__ void __launch_bounds__(THREADS)
linear_relu(int m, int n, int k, const Half* x, const Half* weight, const Half* bias, Half* out) {
    extern __shared__ __align__(128) char shared[];
    cutlass::gemm::GemmCoord tiles((m + Tile::kM - 1) / Tile::kM, (n + Tile::kN - 1) / Tile::kN, 1);
    // A row of stride 0 is added to every row.
    Gemm::Params params({m, n, k}, tiles, {const_cast<Half*>(x), k}, {const_cast<Half*>(weight), n},
                        {const_cast<Half*>(bias), 0}, {out, n}, {1.0f, 1.0f});
    Gemm()(params, *reinterpret_cast<Gemm::SharedStorage*>(shared));
}
