/* Products of float rows with a block-quantised matrix on AVX-512 VNNI, one thread at a time: see block_product.c. */
#pragma once
#include <stdint.h>

enum { BLOCK = 32, TILE = 32 }; /* values a block, columns a tile */

/* W [columns, blocks * BLOCK] as records of `stride` bytes, one a tile and block: codes, TILE scales, TILE sums. */
typedef struct {
  int64_t columns, blocks, bits, tiles, stride;
  uint8_t* records;
} Matrix;

/* Rows x [rows, blocks * BLOCK] rounded to int8: x = scale * code, sums[row][block] = scale * (sum of codes). */
typedef struct {
  int64_t blocks;
  int8_t* codes;
  float *scales, *sums;
} Rounded;

/* Codes [columns, blocks, BLOCK * bits / 8] of MatMulNBits, scales and sums [columns, blocks]. 0: no memory. */
int matrix_pack(Matrix* matrix, const uint8_t* codes, const float* scales, const float* sums);
void matrix_free(Matrix* matrix);

/* Bytes that `rounded_place` needs for rows of so many blocks, on an address that 64 divides. */
int64_t rounded_bytes(int64_t rows, int64_t blocks);
Rounded rounded_place(void* memory, int64_t rows, int64_t blocks);
void round_row(const float* x, int64_t row, const Rounded* rounded);

/* Columns [TILE * tile, TILE * (tile + 1)) of out [rows, columns]. */
void multiply_tile(const Matrix* matrix, const Rounded* rounded, int64_t rows, int64_t tile, float* out);
