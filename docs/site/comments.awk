# The comments of the public headers as Doxygen wants them: "//" before a name becomes "///", at the end of its line "///<".
# Lines stay where they are. What needs no description is left out: deleted and defaulted functions.
/^\/\/ (SPDX-|Copyright)/ { print ""; next }
/= delete;|operator==.*= default;/ { print ""; next }
# The first comment describes the file, not what follows it.
!ended && /^\/\// { print ""; next }
{ ended = 1 }
/^ *\/\/( |$)/ {
  sub(/\/\//, "///")
  gsub(/#/, "\\#")
  gsub(/</, "\\<")
  print
  next
}
/[;{},] +\/\/ / && !/NOLINT/ { sub(/ \/\/ /, " ///< ") }
{ print }
