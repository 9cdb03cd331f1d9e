/* A vector of floats as wide as the processor's registers, and the row types to and from it. */

#ifndef LANES_H
#define LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif

typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

/* torch fuses a product and a sum where the processor can. So does this, for the bits to be the same. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float fused1(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}
#else
static inline float fused1(float a, float b, float c)
{
    return a * b + c;
}
#endif

static inline Lanes fused(float a, Lanes b, Lanes c)
{
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Lanes)vfmaq_n_f32((float32x4_t)c, (float32x4_t)b, a);
#else
    return a * b + c;
#endif
}

static inline Lanes fused_lanes(Lanes a, Lanes b, Lanes c)
{
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)b, (float32x4_t)a);
#else
    return a * b + c;
#endif
}

/* The sum over a, the sum over b, over c, over d. */
static inline Four sums_over(Lanes a, Lanes b, Lanes c, Lanes d)
{
#if defined(__AVX512F__)
    __m512 ab = _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b);
    __m512 cd = _mm512_unpacklo_ps((__m512)c, (__m512)d) + _mm512_unpackhi_ps((__m512)c, (__m512)d);
    __m512 all = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xEE);
    __m256 half = _mm512_castps512_ps256(all) + _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    return (Four)(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(__AVX__)
    __m256 ab = _mm256_unpacklo_ps((__m256)a, (__m256)b) + _mm256_unpackhi_ps((__m256)a, (__m256)b);
    __m256 cd = _mm256_unpacklo_ps((__m256)c, (__m256)d) + _mm256_unpackhi_ps((__m256)c, (__m256)d);
    __m256 all = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xEE);
    return (Four)(_mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
#else
    return (Four){(a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]), (c[0] + c[2]) + (c[1] + c[3]),
                  (d[0] + d[2]) + (d[1] + d[3])};
#endif
}

static inline Lanes chosen(Words where, Lanes these, Lanes others)
{
    return (Lanes)((where & (Words)these) | (~where & (Words)others));
}

/* What is no number stays so. */
static inline Lanes at_most(Lanes values, float limit)
{
    return chosen((Words)(values > limit), (Lanes){0} + limit, values);
}

/* e to the power of each, within one unit in the last place. Below -87 that is 0, above 88 infinity. */
static inline Lanes exponential(Lanes values)
{
    const float whole_numbers = 0x1.8p23f; /* added, it leaves the nearest whole number in the lowest bits */
    Lanes shifted = values * 0x1.715476p0f + whole_numbers, whole = shifted - whole_numbers;
    Lanes rest = values - whole * 0x1.63p-1f + whole * 0x1.bd0106p-13f; /* less whole times the logarithm of 2 */
    Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    sum = sum * (Lanes)(((Words)shifted << 23) + 0x3F800000);
    sum = chosen((Words)(values < -87.0f), (Lanes){0}, sum);
    return chosen((Words)(values > 88.0f), (Lanes){0} + __builtin_inff(), sum);
}

/* bfloat16 is the upper half of a float32. Half way between two of them the even one is taken, or, where `away`, the one
   that is farther from 0. */

static inline float from_bfloat16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value, int away)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + (away ? 0x8000 : 0x7FFF + (bits >> 16 & 1))) >> 16);
}

static inline Lanes lanes_from_bfloat16(Halves halves)
{
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

static inline Halves lanes_to_bfloat16(Lanes values, int away)
{
    Words bits = (Words)values, unordered = (Words)(values != values);
    Words rounded = (bits + (away ? 0x8000 + (bits & 0) : 0x7FFF + (bits >> 16 & 1))) >> 16;
    return __builtin_convertvector((unordered & (bits >> 16 | 0x40)) | (~unordered & rounded), Halves);
}

/* float16: one sign, five exponent and ten fraction bits. */

static inline float from_float16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
    uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    float value;
    if (!exponent) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_float16(float value)
{
    uint32_t bits, size;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000) /* not a number */
        return (uint16_t)(sign | 0x7E00 | (size >> 13 & 0x3FF));
    if (size >= 0x477FF000) /* 65520 and more: infinity */
        return (uint16_t)(sign | 0x7C00);
    if (size < 0x38800000) { /* less than a full fraction: adding 0.5 shifts and rounds it */
        float shifted;
        memcpy(&shifted, &size, 4);
        shifted += 0.5f;
        memcpy(&size, &shifted, 4);
        return (uint16_t)(sign | (size - 0x3F000000));
    }
    size += 0xFFF + (size >> 13 & 1);
    return (uint16_t)(sign | ((size - 0x38000000) >> 13));
}

static inline Lanes lanes_from_float16(Halves halves)
{
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (Lanes)_mm256_cvtph_ps((__m128i)halves);
#else
    Lanes values;
    for (int i = 0; i < WIDTH; i++)
        values[i] = from_float16(halves[i]);
    return values;
#endif
}

static inline Halves lanes_to_float16(Lanes values)
{
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Halves halves;
    for (int i = 0; i < WIDTH; i++)
        halves[i] = to_float16(values[i]);
    return halves;
#endif
}

#endif
