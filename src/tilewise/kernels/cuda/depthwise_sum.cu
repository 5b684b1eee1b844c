// Planes as sums over shares, in order, from workspace into the result: each ``inner`` of them lie ``y_inner`` apart
// there, those ``y_outer``.

extern "C" __global__ void BOUNDS depthwise_sum(const float* __restrict__ partial, Result* __restrict__ y, i64 elements,
                                                i64 shares, i64 rows, i64 columns, i64 inner, i64 y_outer, i64 y_inner,
                                                i64 y_row, i64 y_column) {
  const i64 i = blockIdx.x * (i64)THREADS + threadIdx.x;
  if (i >= elements) return;
  float sum = 0.f;
  for (i64 share = 0; share < shares; ++share) sum += partial[share * elements + i];
  const unsigned place = (unsigned)i, row = place / (unsigned)columns, plane = row / (unsigned)rows;
  const unsigned outer = plane / (unsigned)inner;
  y += outer * y_outer + (plane - outer * (unsigned)inner) * y_inner;
  put<false>(true, y + (row - plane * (unsigned)rows) * y_row + (place - row * (unsigned)columns) * y_column, sum);
}
