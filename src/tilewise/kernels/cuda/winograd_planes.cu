// Convolution of planes with fewer products along a line (Winograd 1980; Lavin and Gray 2016, section 4), in one kernel:
// what is transformed is never in memory.
//
// Along the width, OUTPUTS results of WIDE_TAPS taps take POINTS products. A task is CHANNELS channels of 2 PLACES
// places, of which each is a tile of OUTPUTS results; places follow each other along lines of TILES tiles, and lines from
// image to image with gaps of zeros. Threads of the last warpgroups (readers) fetch DEPTH channels at a time of all lines
// that are needed (``raw``), bring the inputs of every tile to the points, scaled by a power of two, and split them into
// two fp16 parts each (Ootomo and Yokota 2022, section 3). Two warpgroups multiply by the filters' parts: at each point a
// convolution down the lines, whose taps are the same rows TILES further on. Sums of a point go into the tile's results
// in registers, before the next point's.
//
// Points are taken in pairs: zero with infinity, others with their negatives, whose even terms are the same. Parts of a
// pair are in one of HELD places (``parts``), filters of a point in one of FILTERS_HELD. Blocks take task after task, and
// readers are ahead.

constexpr int ROWS = 2 * PLACES + (TAPS - 1) * TILES, LINES = (ROWS + TILES - 2) / TILES + 1;
constexpr int PITCH = TILES * OUTPUTS + 4, RAW = DEPTH * LINES * PITCH;
constexpr int PART = DEPTH * ROWS, PARTS = 2 * PART;  // fp16 numbers of a point
constexpr int FILTER = DEPTH * CHANNELS, FILTERS = 2 * TAPS * FILTER;
constexpr int SUMS = PLACES / 2, PAIRS = (POINTS + 1) / 2;
constexpr int MULTIPLIERS = 256, ALL = MULTIPLIERS + READERS;
constexpr int STAGED_PITCH = STAGED + 4;  // results of a row that wait to be written, of eight rows a warp

struct Line { int at; float scale; int exponent; };  // bytes from the first image's first or -1: zeros; of its image

struct Tables {
  unsigned long long parts_full[HELD], parts_empty[HELD], filters_full[FILTERS_HELD], filters_empty[FILTERS_HELD];
  unsigned long long lines_empty[2];
  Line lines[2][LINES];  // of this task and the next
};
constexpr int TABLES = (sizeof(Tables) + 127) / 128 * 128, RAW_BYTES = (RAW * 4 + 127) / 128 * 128;
constexpr int PARTS_BYTES = (2 * PARTS * 2 + 127) / 128 * 128;
constexpr int STAGED_BYTES = MULTIPLIERS / 32 * 8 * STAGED_PITCH * 4;
static_assert(FILTERS_HELD > 2, "filters of the next point come when those of the last are done with");
static_assert(TABLES + RAW_BYTES + HELD * PARTS_BYTES + FILTERS_HELD * FILTERS * 2 + STAGED_BYTES <= SHARED_BYTES,
              "shared memory");

// One of a ring of buffers, and the parity of its barriers.
template <int COUNT> struct Ring {
  int index = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == COUNT) index = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float power(int exponent) { return float_of((unsigned)(exponent + 127) << 23); }

// Halfway between the least and the greatest number of a warp.
__device__ __forceinline__ int middle(int number) {
  float least = (float)number, most = least;
#pragma unroll
  for (int other = 16; other; other /= 2) {
    least = fminf(least, __shfl_xor_sync(~0u, least, other));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
  }
  return (int)(least + most) / 2;
}

// Two values as fp16 and what is left of them.
__device__ __forceinline__ void split(float a, float b, unsigned& high, unsigned& low) {
  high = two_halves(a, b);
  float a_high, b_high;
  from_halves(high, a_high, b_high);
  low = two_halves(a - a_high, b - b_high);
}

template <int COUNT> struct Halves;  // fp16 numbers that are stored at once
template <> struct Halves<8> {
  using type = uint4;
  static __device__ __forceinline__ uint4 of(const unsigned (&a)[4]) { return make_uint4(a[0], a[1], a[2], a[3]); }
};
template <> struct Halves<2> {
  using type = unsigned;
  static __device__ __forceinline__ unsigned of(const unsigned (&a)[1]) { return a[0]; }
};
template <> struct Halves<4> {
  using type = uint2;
  static __device__ __forceinline__ uint2 of(const unsigned (&a)[2]) { return make_uint2(a[0], a[1]); }
};

// Rows of eight channels, from number ``first`` on, each at the points of a group, from those channels' lines: a thread
// takes WIDTH channels.
template <int GROUP, int WIDTH>
__device__ __forceinline__ void bring(const float* raw, const Line* lines, int skipped,
                                      unsigned short* const (&to)[Points<GROUP>::COUNT], int first, int count) {
  constexpr int COUNT = Points<GROUP>::COUNT, PAIRED = WIDTH / 2;
  using Vector = typename Halves<WIDTH>::type;
#pragma unroll 1
  for (int unit = (int)threadIdx.x - MULTIPLIERS; unit < count * (8 / WIDTH); unit += READERS) {
    const int eight = first + unit % count, some = eight / ROWS * 8 + unit / count * WIDTH, row = eight % ROWS;
    const int line = (row + skipped) / TILES, tile = (row + skipped) - line * TILES;
    const float scale = lines[line].scale;
    const float4* from = (const float4*)(raw + (some * LINES + line) * PITCH + tile * OUTPUTS);
    unsigned high[COUNT][PAIRED], low[COUNT][PAIRED];
#pragma unroll
    for (int pair = 0; pair < PAIRED; ++pair) {
      float v[2][COUNT];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float4 a = from[(2 * pair + side) * (LINES * PITCH / 4)], b = from[(2 * pair + side) * (LINES * PITCH / 4) + 1];
        const float d[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        Points<GROUP>::at(d, scale, v[side]);
      }
#pragma unroll
      for (int k = 0; k < COUNT; ++k) split(v[0][k], v[1][k], high[k][pair], low[k][pair]);
    }
    const int place = (some / 8 * ROWS + row) * 8 + some % 8;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      *(Vector*)(to[k] + place) = Halves<WIDTH>::of(high[k]);
      *(Vector*)(to[k] + place + PART) = Halves<WIDTH>::of(low[k]);
    }
  }
}

// Where a task's images are read.
struct Source {
  const char* x;  // of the first image that is read
  int first_column, skipped;  // places of the first line before the task's
};

// What a block's tasks are, in order.
struct Tasks {
  int first, step, count;
  int channel_blocks, place_blocks;
  __device__ __forceinline__ int channel_block(int task) const { return task % channel_blocks; }
  __device__ __forceinline__ int place(int task) const { return task / channel_blocks % place_blocks * 2 * PLACES; }
  __device__ __forceinline__ int segment(int task) const { return task / channel_blocks / place_blocks; }
};

// Filters of points, in the order in which they are needed.
struct Filters {
  const unsigned short* all;
  Tasks tasks;
  int points;  // of a task
  int task, left;
  const unsigned short* next;  // none after the last

  __device__ __forceinline__ void begin(int number) {
    task = number;
    left = points;
    next = task < tasks.count ? all + (i64)tasks.channel_block(task) * points * FILTERS : nullptr;
  }
  __device__ __forceinline__ void advance() {
    next += FILTERS;
    if (--left == 0) begin(task + tasks.step);
  }
  __device__ __forceinline__ void fetch(unsigned short* held, unsigned long long* full) const {
    if (next == nullptr) return;
    barrier_expect(full, FILTERS * 2);
    copy_bulk(held, next, FILTERS * 2, full);
  }
};

// Begins the products of a point, whose operands are at the addresses ``x`` and ``f``.
__device__ __forceinline__ void begin(unsigned x, unsigned f, float (&sums)[SUMS]) {
  begin_sums(sums);
  units_begin();
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) {
    const unsigned long long a = operand(f + tap * FILTER * 2, CHANNELS * 16, 128);
    const unsigned long long a_low = operand(f + (TAPS + tap) * FILTER * 2, CHANNELS * 16, 128);
    const unsigned long long b = operand(x + tap * TILES * 16, ROWS * 16, 128);
    const unsigned long long b_low = operand(x + PART * 2 + tap * TILES * 16, ROWS * 16, 128);
    multiply_add(sums, a_low, b, tap > 0);
    multiply_add(sums, a, b_low, true);
    multiply_add(sums, a, b, true);
  }
  units_commit();
}

__device__ __forceinline__ void add(float factor, const float (&sums)[SUMS], float (&results)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) results[i] = fmaf(factor, sums[i], results[i]);
}

// Into a tile's results, with the point's powers.
__device__ __forceinline__ void add_powers(float value, const float (&sums)[SUMS], float (&results)[OUTPUTS][SUMS]) {
  float power = 1.f;
#pragma unroll
  for (int j = 0; j < OUTPUTS; ++j) {
    add(power, sums, results[j]);
    power *= value;
  }
}

// The two warpgroups that multiply, each half of the places.
struct Multiplier {
  Tables& tables;
  const unsigned parts;
  unsigned short* const filters_at;
  Filters filters;  // those that are fetched next
  const int thread;
  Ring<HELD> held;
  Ring<FILTERS_HELD> filters_held, filters_done, before;
  bool later = false;

  __device__ __forceinline__ void begin_point(int second, float (&sums)[SUMS]) {
    barrier_wait(&tables.filters_full[filters_held.index], filters_held.parity);
    begin(parts + held.index * PARTS_BYTES + second * PARTS * 2,
          shared_address(filters_at) + filters_held.index * FILTERS * 2, sums);
    filters_held.next();
  }

  // Those that come in their place are fetched one point later, when all warps should have come here.
  __device__ __forceinline__ void done_with_filters() {
    if (thread % 32 == 0) barrier_arrive(&tables.filters_empty[filters_done.index]);
    if (thread < 32) {
      if (later && filters.next != nullptr) {
        barrier_wait(&tables.filters_empty[before.index], before.parity);
        if (thread == 0) filters.fetch(filters_at + before.index * FILTERS, &tables.filters_full[before.index]);
        filters.advance();
      }
      before = filters_done;
      later = true;
    }
    filters_done.next();
  }

  __device__ __forceinline__ void done_with_parts() {
    if (thread % 32 == 0) barrier_arrive(&tables.parts_empty[held.index]);
    held.next();
  }

  // Not unrolled: addresses of the next points' operands would fill registers. Even powers take what both points' sums add
  // up to, odd ones what they differ by.
  __device__ __forceinline__ void run(int steps, float (&results)[OUTPUTS][SUMS]) {
    float sums[SUMS], others[SUMS];
    int pair = 0;
#pragma unroll 1
    for (int step = 0; step < steps * PAIRS; ++step) {
      const bool alone = POINTS % 2 && pair == PAIRS - 1;
      const float value = POINT_VALUES[pair];
      barrier_wait(&tables.parts_full[held.index], held.parity);
      begin_point(0, sums);
      if (!alone) begin_point(1, others);
      units_wait();
      keep_sums(sums);
      if (!alone) keep_sums(others);
      done_with_parts();
      done_with_filters();
      if (!alone) done_with_filters();
      if (pair == 0) {
        add(1.f, sums, results[0]);
        add(1.f, others, results[OUTPUTS - 1]);
      } else if (alone) {
        add_powers(value, sums, results);
      } else {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          const float even = sums[i] + others[i], odd = value * (sums[i] - others[i]);
          results[0][i] += even;
          results[1][i] += odd;
          results[2][i] = fmaf(value * value, even, results[2][i]);
          results[3][i] = fmaf(value * value, odd, results[3][i]);
        }
      }
      if (++pair == PAIRS) pair = 0;
    }
  }
};

template <int GROUP>
__device__ __forceinline__ void bring_all(const float* raw, Tables& tables, const Line* lines, int skipped, char* parts,
                                          Ring<HELD>& ring) {
  constexpr int COUNT = Points<GROUP>::COUNT;
  unsigned short* to[COUNT];
  int full[(COUNT + 1) / 2];
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    if (k % 2 == 0) {
      barrier_wait(&tables.parts_empty[ring.index], ring.parity ^ 1);
      full[k / 2] = ring.index;
      ring.next();
    }
    to[k] = (unsigned short*)(parts + full[k / 2] * PARTS_BYTES) + k % 2 * PARTS;
  }
  // What does not come to a row of eight channels for each thread is shared among more of them.
  constexpr int EIGHTS = DEPTH / 8 * ROWS, WHOLE = EIGHTS / READERS * READERS, REST = EIGHTS - WHOLE;
  constexpr int WIDTH = REST * 4 <= READERS ? 2 : REST * 2 <= READERS ? 4 : 8;
  if constexpr (WHOLE > 0) bring<GROUP, 8>(raw, lines, skipped, to, 0, WHOLE);
  if constexpr (REST > 0) bring<GROUP, WIDTH>(raw, lines, skipped, to, WHOLE, REST);
  fence_for_units();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < COUNT; k += 2) barrier_arrive(&tables.parts_full[full[k / 2]]);
  }
  if constexpr (GROUP + 1 < GROUPS) bring_all<GROUP + 1>(raw, tables, lines, skipped, parts, ring);
}

struct Images {
  const float* x;
  const int* peaks;
  int images, shares, channels, height, width, pitch, before, first_column;
  i64 x_n, x_c, x_h, x_w;

  // A task's source, and of every line that is read: where it is, and its image's scale. Eight threads look at an image's
  // ``shares``.
  __device__ __forceinline__ Source find(Line* lines, int place, int segment) const {
    constexpr int TOGETHER = 8;
    const int first_line = place / TILES, first_image = min(first_line / pitch, images - 1);
    for (int i = (int)threadIdx.x - MULTIPLIERS; i < (LINES * TOGETHER + 31) / 32 * 32; i += READERS) {
      const int line = i / TOGETHER, from = first_line + line, image = from / pitch, h = from - image * pitch - before;
      int top = 15;
      for (int k = i % TOGETHER; image < images && k < shares; k += TOGETHER) top = max(top, peaks[image * shares + k]);
#pragma unroll
      for (int other = TOGETHER / 2; other; other /= 2)
        top = max(top, (int)bits_of(__shfl_xor_sync(~0u, float_of((unsigned)top), other)));
      const bool there = image < images && h >= 0 && h < height;
      if (i % TOGETHER == 0 && line < LINES)
        lines[line] = {there ? (int)(((image - first_image) * x_n + h * x_h) * 4) : -1,
                       float_of((unsigned)(268 - IMAGE_SHIFT - top) << 23), top + IMAGE_SHIFT};
    }
    return {(const char*)(x + first_image * x_n), segment * TILES * OUTPUTS + first_column,
            place - first_line * TILES};
  }

  // Channels of all lines on their way to ``raw``; those from ``count`` on are zeros.
  template <bool WHOLE>
  __device__ __forceinline__ void fetch(const Source& source, int step, const Line* lines, float* raw) const {
    const int count = channels - step * DEPTH;
    const char* own = source.x + step * DEPTH * x_c * 4;
    const unsigned channel = (unsigned)x_c * 4, column = (unsigned)x_w * 4;
#pragma unroll 1
    for (int place = (int)threadIdx.x - MULTIPLIERS; place < LINES * PITCH; place += READERS) {
      const int line = place / PITCH, w = source.first_column + place - line * PITCH;
      const int at = lines[line].at;
      const bool inside = at >= 0 && w >= 0 && w < width;
      unsigned from = inside ? (unsigned)at + (unsigned)w * column : 0u;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        copy_or_zero(raw + i * LINES * PITCH + place, (const float*)(own + from), inside && (WHOLE || i < count));
        if (WHOLE || i + 1 < count) from += channel;
      }
    }
  }
  __device__ __forceinline__ void fetch(const Source& source, int step, const Line* lines, float* raw) const {
    if (channels - step * DEPTH >= DEPTH) fetch<true>(source, step, lines, raw);
    else fetch<false>(source, step, lines, raw);
  }
};

// Readers: a step of a task is on its way while what is there of the last ones is multiplied.
__device__ __forceinline__ void read_all(const Images& images, const Tasks& tasks, Tables& tables, int steps, float* raw,
                                         char* parts) {
  Ring<HELD> ring;
  Ring<2> lines;
  for (int task = tasks.first; task < tasks.count; task += tasks.step) {
    Line* own = tables.lines[lines.index];
    barrier_wait(&tables.lines_empty[lines.index], lines.parity ^ 1);
    const Source source = images.find(own, tasks.place(task), tasks.segment(task));
    meet(1, READERS);
    for (int step = 0; step < steps; ++step) {
      images.fetch(source, step, own, raw);
      wait_copies();
      meet(1, READERS);  // all have what they fetched
      bring_all<0>(raw, tables, own, source.skipped, parts, ring);
      meet(1, READERS);  // and need it no more
    }
    lines.next();
  }
}

struct Results {
  float* y;
  const int* exponents;
  const float* bias;
  int images, pitch, height, width, channels;
  i64 y_n, y_c, y_h, y_w;

  // Of a warp: through ``staged``, eight rows and STAGED columns at a time, so that neighbours write neighbours. A result's
  // exponent is its row's over the middle of all rows' and half of the rest, twice: none of the three is out of range.
  __device__ __forceinline__ void write(const float (&results)[OUTPUTS][SUMS], const Line* lines, int place, int segment,
                                        int channel, float* staged) const {
    constexpr int GROUP = STAGED / OUTPUTS / 8, EACH = STAGED / 32;  // eights of places, columns of a thread
    const int lane = threadIdx.x % 32, own = (int)threadIdx.x / 128 * PLACES, first = channel + (int)threadIdx.x % 128 / 32 * 16;
    const int rows = channels - first;
    if (rows <= 0) return;
    const int exponent_of_row = __ldg(exponents + first + min(lane % 16, rows - 1)), shift = middle(exponent_of_row);
    const float factors = power(exponent_of_row - shift);
#pragma unroll
    for (int eight = 0; eight < PLACES / 8; eight += GROUP) {
      float* to[EACH];
      float half[EACH], other_half[EACH];
#pragma unroll
      for (int k = 0; k < EACH; ++k) {
        const int column = k * 32 + lane, at = place + own + eight * 8 + column / OUTPUTS, line = at / TILES;
        const int image = line / pitch, h = line - image * pitch, w = (segment * TILES + at % TILES) * OUTPUTS + column % OUTPUTS;
        const bool there = eight * 8 + column / OUTPUTS < PLACES && image < images && h < height && w < width;
        to[k] = there ? y + first * y_c + image * y_n + h * y_h + w * y_w : nullptr;
        const int exponent = there ? lines[line - place / TILES].exponent + shift - 282 : 0;
        half[k] = power(exponent >> 1);
        other_half[k] = power(exponent - (exponent >> 1));
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        __syncwarp();
#pragma unroll
        for (int k = 0; k < GROUP && eight + k < PLACES / 8; ++k)
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            const int i = (eight + k) * 4 + side * 2 + next;
            *(float4*)(staged + lane / 4 * STAGED_PITCH + (k * 8 + lane % 4 * 2 + next) * OUTPUTS) =
                make_float4(results[0][i], results[1][i], results[2][i], results[3][i]);
          }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          const float factor = __shfl_sync(~0u, factors, side * 8 + r);
          if (side * 8 + r >= rows) continue;
          const float more = BIAS ? __ldg(bias + first + side * 8 + r) : 0.f;
#pragma unroll
          for (int k = 0; k < EACH; ++k) {
            const float plain = staged[r * STAGED_PITCH + k * 32 + lane] * half[k] * factor * other_half[k];
            const float value = BIAS ? plain + more : plain;
            if (to[k] != nullptr) *to[k] = ACCUMULATE ? *to[k] + value : value;
          }
#pragma unroll
          for (int k = 0; k < EACH; ++k)
            if (to[k] != nullptr) to[k] += y_c;
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(ALL, 1)
winograd_planes(const float* __restrict__ x, const int* __restrict__ peaks, const unsigned short* __restrict__ parts_of_filters,
                const int* __restrict__ exponents, float* __restrict__ y, const float* __restrict__ bias, i64 step, i64 images,
                i64 shares, i64 channels, i64 filters_count, i64 height, i64 width, i64 pitch, i64 before, i64 first_column, i64 out_height,
                i64 out_width, i64 place_blocks, i64 segments, i64 x_n, i64 x_c, i64 x_h, i64 x_w, i64 y_n, i64 y_c, i64 y_h,
                i64 y_w) {
  char* memory = (char*)shared_memory();
  Tables& tables = *(Tables*)memory;
  float* raw = (float*)(memory + TABLES);
  char* parts = memory + TABLES + RAW_BYTES;
  unsigned short* held = (unsigned short*)(parts + HELD * PARTS_BYTES);
  const int channel_blocks = (int)((filters_count + CHANNELS - 1) / CHANNELS);
  const int steps = (int)(channels + DEPTH - 1) / DEPTH;
  const Tasks tasks = {(int)blockIdx.x, (int)step, channel_blocks * (int)(place_blocks * segments), channel_blocks,
                       (int)place_blocks};
  if (threadIdx.x == 0) {
    for (int i = 0; i < HELD; ++i) {
      barrier_init(&tables.parts_full[i], READERS / 32);
      barrier_init(&tables.parts_empty[i], MULTIPLIERS / 32);
    }
    for (int i = 0; i < FILTERS_HELD; ++i) {
      barrier_init(&tables.filters_full[i], 1);
      barrier_init(&tables.filters_empty[i], MULTIPLIERS / 32);
    }
    for (int i = 0; i < 2; ++i) barrier_init(&tables.lines_empty[i], MULTIPLIERS / 32);
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x >= MULTIPLIERS) {
    fewer_registers<READER_REGISTERS>();
    const Images read = {x, peaks, (int)images, (int)shares, (int)channels, (int)height, (int)width, (int)pitch, (int)before,
                         (int)first_column, x_n, x_c, x_h, x_w};
    read_all(read, tasks, tables, steps, raw, parts);
  } else {
    more_registers<MULTIPLIER_REGISTERS>();
    const Results written = {y, exponents, bias, (int)images, (int)pitch, (int)out_height, (int)out_width,
                             (int)filters_count, y_n, y_c, y_h, y_w};
    Multiplier multiplier = {tables, shared_address(parts) + (int)threadIdx.x / 128 * PLACES * 16, held,
                             {parts_of_filters, tasks, steps * POINTS}, kept((int)threadIdx.x)};
    Filters& filters = multiplier.filters;
    filters.begin(tasks.first);
    for (int i = 0; i < FILTERS_HELD; ++i) {
      if (threadIdx.x == 0) filters.fetch(held + i * FILTERS, &tables.filters_full[i]);
      if (filters.next != nullptr) filters.advance();
    }
    float* staged = (float*)(held + FILTERS_HELD * FILTERS) + threadIdx.x / 32 * 8 * STAGED_PITCH;
    Ring<2> lines;
#pragma unroll 1
    for (int task = tasks.first; task < tasks.count; task += tasks.step) {
      float results[OUTPUTS][SUMS];
#pragma unroll
      for (int j = 0; j < OUTPUTS; ++j)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) results[j][i] = 0.f;
      multiplier.run(steps, results);
      written.write(results, tables.lines[lines.index], tasks.place(task), tasks.segment(task),
                    tasks.channel_block(task) * CHANNELS, staged);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&tables.lines_empty[lines.index]);
      lines.next();
    }
  }
}
