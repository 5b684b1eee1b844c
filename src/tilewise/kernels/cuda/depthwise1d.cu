// Depthwise convolutions of long signals by 1-D Fourier transforms, all in one kernel: signals are read once, results
// written once, and no spectrum of a signal leaves the multiprocessor.
//
// What depthwise1d.py writes above this, all of it known when the kernel is compiled:
//   A, B, C           factors of M = A B C, the complex points of 2 M real elements; A and B are even
//   SIGNALS           signals of a thread block, with T = A B / 2 threads each
//   PAIRED_FIRST, PAIRED_SECOND, PAIRED_RESULT    an operand or the result is accessed two elements at a time
//   APART_FIRST, APART_SECOND, APART_RESULT       how far apart their elements lie in the basis
//   CORRELATE         the product with a filter is one with its conjugate
//   WIDE              results are fp32 whatever the operands
//   forward_a, ..., inverse_c    codelets of A, B and C points
//   TURNS_A           powers of exp(-2 pi i j / M) for j < B C; see ``turn``
//   TURNS_B           powers of exp(-2 pi i j / (B C)) for j < C
//   TURNS             exp(-2 pi i k / M) for the row k = k1 + A k2 of each thread
//   ROOTS             exp(-2 pi i j / (2 C)) for j < 2 C
//
// A real signal is a complex one of half as many elements, z[j] = x[2j] + i x[2j+1]. With j = (j1 B + j2) C + j3 and
// k = k1 + A (k2 + B k3) its transform takes three passes, over j1, j2 and j3, each in place in shared memory and with a
// turn of the numbers after it. Back, the same passes run in reverse order, so that no number is ever put in order.
//
// The real signal's spectrum needs Z[k] beside Z[M-k]. The frequency opposite to (k1, k2, k3) is (A-k1, B-1-k2, C-1-k3),
// or (0, B-k2, C-1-k3) where k1 is 0, so the third pass gives a thread two rows that hold all of each other's opposites,
// and the product is done in registers between the row's way there and back. Only the rows (0, 0) and (0, B/2) are
// their own opposites; thread 0 takes both.
//
// With E and O the spectra of even and of odd elements, and W = exp(-2 pi i k / M), a product with a filter's spectrum is
// E' = E Fe + W O Fo, O' = O Fe + E Fo, and one with its conjugate E' = E Fe* + O Fo*, O' = O Fe* + E (W Fo)*.
//
// Strides and dilation are computed in full: an output gradient's elements lie ``stride`` apart among zeros, a filter's
// ``dilation``, and of what comes back only every so many are kept.
//
// Signals longer than a basis go in tiles, each with what it reads beside it (overlap-save): a tile is a signal of its
// own here.

constexpr int M = A * B * C, T = A * B / 2;
// From row to row in shared memory, odd, and from k1 to k1, where one's last column is followed by the next one's first
// modulo 16 banks of complex numbers: neighbouring threads meet in no bank.
constexpr int PITCH = C | 1, BLOCK = B * PITCH + (C + 15 * B * PITCH) % 16, SIGNAL = A * BLOCK;
// A filter's spectrum in complex numbers: for every pair of frequencies Fe and Fo, thread after thread, and the pair
// that thread 0 has beyond the others'.
constexpr int SPECTRUM = M + 2 * T;

__device__ __forceinline__ float2 times(float2 a, float2 b) {
  return make_float2(fmaf(a.x, b.x, -a.y * b.y), fmaf(a.x, b.y, a.y * b.x));
}
__device__ __forceinline__ float2 scaled(float f, float2 a) { return make_float2(f * a.x, f * a.y); }
__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
// a times b or its conjugate, added to c
template <bool CONJUGATE> __device__ __forceinline__ float2 plus_product(float2 c, float2 a, float2 b) {
  if constexpr (CONJUGATE) b = conjugate(b);
  return make_float2(fmaf(a.x, b.x, fmaf(-a.y, b.y, c.x)), fmaf(a.x, b.y, fmaf(a.y, b.x, c.y)));
}

// Number k times power k of w, or with BACK its conjugate. ``table`` holds the powers 1, 2, 3 and then 4, 8, 12, ... of
// all w, ``stride`` apart; others are products of two, since errors would grow with powers of one.
template <bool BACK, int COUNT>
__device__ __forceinline__ void turn(float2 (&r)[COUNT], const float2* table, int stride) {
  float2 low[4], high;
#pragma unroll
  for (int k = 1; k < COUNT; ++k) {
    float2 power;
    if (k < 4) low[k] = table[(k - 1) * stride];
    if (k % 4 == 0) high = table[(2 + k / 4) * stride];
    if (k < 4) power = low[k];
    else power = k % 4 ? times(low[k % 4], high) : high;
    r[k] = times(r[k], BACK ? conjugate(power) : power);
  }
}

// Elements [low, high) of a signal, which lie ``step`` apart in memory. In the basis they lie APART apart if they are
// ``spread`` and side by side if not; place 0 of the basis is place ``first``, counted from element 0's.
struct Span {
  i64 step;
  int first, low, high;
  bool spread = true;
  __device__ __forceinline__ bool has(int element) const {
    return (unsigned)(element - low) < (unsigned)(high - low);
  }
};

// Of two places of a basis whose elements are spread: at most one holds an element.
template <int APART> struct Place {
  int element;
  bool second, has;
  __device__ __forceinline__ Place(const Span& span, int j) {
    const int place = span.first + 2 * j;
    second = place % APART != 0;
    element = (place + second) / APART;
    has = (place + second) % APART == 0 && span.has(element);
  }
};

template <bool PAIRS, int APART>
__device__ __forceinline__ float2 element_pair(const Real* x, const Span& span, int j) {
  if (APART > 1 && span.spread) {
    const Place<APART> place(span, j);
    const float a = load_real<false, true>(place.has, x + span.step * place.element);
    return place.second ? make_float2(0.f, a) : make_float2(a, 0.f);
  }
  const int element = span.first + 2 * j;
  const bool has = span.has(element);
  const Real* p = x + span.step * element;
  if constexpr (PAIRS) return load_reals<true, true>(has, p);
  const float a = load_real<false, true>(has, p);
  return make_float2(a, load_real<false, true>(span.has(element + 1), p + span.step));
}

template <bool PAIRS, int APART>
__device__ __forceinline__ void put_pair(Result* y, const Span& span, int j, float2 value) {
  if constexpr (APART > 1) {
    const Place<APART> place(span, j);
    put<true>(place.has, y + span.step * place.element, place.second ? value.y : value.x);
    return;
  }
  const int element = span.first + 2 * j;
  Result* p = y + span.step * element;
  if constexpr (PAIRS) {
    put<true>(span.has(element), p, value);
  } else {
    put<true>(span.has(element), p, value.x);
    put<true>(span.has(element + 1), p + span.step, value.y);
  }
}

// The first two passes: from memory to rows in shared memory, by ``count`` threads. Other signals may go with them.
template <bool PAIRS, int APART>
__device__ __forceinline__ void to_rows(const Real* x, const Span& span, int t, int count, float2* s) {
#pragma unroll 1
  for (int j = t; j < B * C; j += count) {
    float2 r[A];
#pragma unroll
    for (int i = 0; i < A; ++i) r[i] = element_pair<PAIRS, APART>(x, span, i * (B * C) + j);
    forward_a(r);
    turn<false>(r, TURNS_A + j, B * C);
    float2* column = s + j / C * PITCH + j % C;
#pragma unroll
    for (int k = 0; k < A; ++k) column[k * BLOCK] = r[k];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = t; i < A * C; i += count) {
    float2* column = s + i / C * BLOCK + i % C;
    float2 r[B];
#pragma unroll
    for (int j = 0; j < B; ++j) r[j] = column[j * PITCH];
    forward_b(r);
    turn<false>(r, TURNS_B + i % C, C);
#pragma unroll
    for (int k = 0; k < B; ++k) column[k * PITCH] = r[k];
  }
  __syncthreads();
}

// And back: from rows to memory.
template <bool PAIRS, int APART>
__device__ __forceinline__ void from_rows(float2* s, int t, Result* y, const Span& span) {
  __syncthreads();
#pragma unroll 1
  for (int i = t; i < A * C; i += T) {
    float2* column = s + i / C * BLOCK + i % C;
    float2 r[B];
#pragma unroll
    for (int k = 0; k < B; ++k) r[k] = column[k * PITCH];
    turn<true>(r, TURNS_B + i % C, C);
    inverse_b(r);
#pragma unroll
    for (int j = 0; j < B; ++j) column[j * PITCH] = r[j];
  }
  __syncthreads();
#pragma unroll 1
  for (int j = t; j < B * C; j += T) {
    const float2* column = s + j / C * PITCH + j % C;
    float2 r[A];
#pragma unroll
    for (int k = 0; k < A; ++k) r[k] = column[k * BLOCK];
    turn<true>(r, TURNS_A + j, B * C);
    inverse_a(r);
#pragma unroll
    for (int i = 0; i < A; ++i) put_pair<PAIRS, APART>(y, span, i * (B * C) + j, r[i]);
  }
}

// Where the two rows of a thread are: one, and the one with its opposites.
struct Rows {
  int first, second;
  __device__ __forceinline__ explicit Rows(int t) {
    const int k1 = t / B, k2 = t % B;
    if (k1) set(k1, k2, A - k1, B - 1 - k2);
    else if (k2 >= B / 2) set(A / 2, k2 - B / 2, A / 2, B - 1 - (k2 - B / 2));
    else set(0, k2, 0, k2 ? B - k2 : B / 2);
  }
  __device__ __forceinline__ void set(int k1, int k2, int m1, int m2) {
    first = k1 * BLOCK + k2 * PITCH;
    second = m1 * BLOCK + m2 * PITCH;
  }
};

struct RowPair {
  float2 a[C], b[C];
  __device__ __forceinline__ float2& operator[](int i) { return i < C ? a[i] : b[i - C]; }
};

__device__ __forceinline__ void rows_forward(const float2* s, const Rows& rows, RowPair& r) {
  const float2 *first = s + rows.first, *second = s + rows.second;
#pragma unroll
  for (int i = 0; i < C; ++i) r.a[i] = first[i], r.b[i] = second[i];
  forward_c(r.a);
  forward_c(r.b);
}

__device__ __forceinline__ void rows_inverse(RowPair& r, const Rows& rows, float2* s) {
  float2 *first = s + rows.first, *second = s + rows.second;
  inverse_c(r.a);
  inverse_c(r.b);
#pragma unroll
  for (int i = 0; i < C; ++i) first[i] = r.a[i], second[i] = r.b[i];
}

// visit(i, m, slot, W): pairs of opposites i and m among a thread's 2 C numbers; they are one at zero and at the middle.
template <class Visit> __device__ __forceinline__ void each_pair(int t, const Visit& visit) {
  if (t) {
    const float2 turns = TURNS[t];
#pragma unroll
    for (int k = 0; k < C; ++k) visit(k, 2 * C - 1 - k, k, times(turns, ROOTS[2 * k]));
  } else {
#pragma unroll
    for (int k = 0; k <= C / 2; ++k) visit(k, k ? C - k : 0, k, ROOTS[2 * k]);
#pragma unroll
    for (int k = 0; k < C / 2; ++k) visit(C + k, 2 * C - 1 - k, C / 2 + 1 + k, ROOTS[2 * k + 1]);
  }
}

// Twice the spectra of even and of odd elements at a frequency, from it and from its opposite.
__device__ __forceinline__ void halves(float2 a, float2 b, float2& even, float2& odd) {
  even = make_float2(a.x + b.x, a.y - b.y);
  odd = make_float2(a.y + b.y, b.x - a.x);
}

// The product of a pair and a filter's at the same frequency; ``high`` belongs to the opposite one.
template <bool CONJUGATE>
__device__ __forceinline__ void pair_product(float2 a, float2 b, float2 f_even, float2 f_odd, float2 w, float2& low,
                                             float2& high) {
  float2 even, odd;
  halves(a, b, even, odd);
  const float2 zero = make_float2(0.f, 0.f), turned = times(w, f_odd);
  const float2 e = plus_product<CONJUGATE>(plus_product<CONJUGATE>(zero, even, f_even), odd, CONJUGATE ? f_odd : turned);
  const float2 o = plus_product<CONJUGATE>(plus_product<CONJUGATE>(zero, odd, f_even), even, CONJUGATE ? turned : f_odd);
  low = make_float2(e.x - o.y, e.y + o.x);
  high = make_float2(e.x + o.y, o.x - e.y);
}

// Signal ``number`` of a row of channels, images and tiles, tiles innermost; beyond the last it is the last.
struct Signal {
  unsigned channel, image, tile;
  bool exists;
  __device__ __forceinline__ Signal(unsigned number, unsigned count, unsigned images, unsigned tiles) {
    exists = number < count;
    if (!exists) number = count - 1;
    const unsigned plane = number / tiles;
    tile = number - plane * tiles;
    channel = plane / images;
    image = plane - channel * images;
  }
};
