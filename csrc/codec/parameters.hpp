// Which parameters a codec has, and their texts. For the files of this folder.
#pragma once

#include <string>
#include <string_view>

#include "codec/codec.hpp"

namespace torch_iroh::codec {

inline constexpr Kind kLastKind = Kind::topk_int4;

std::string_view name_of(Kind kind);  // empty where there is no such kind

bool takes_block(Kind kind);     // scales, by block
bool takes_scale(Kind kind);     // of two widths
bool takes_rounding(Kind kind);  // of two kinds

// Throws Error(invalid) where a field that the codec uses has a value without meaning.
void check(const Codec& codec);

std::string number_text(double number);  // the shortest that reads back as this number

}  // namespace torch_iroh::codec
