// The search lists pages that explain a word before those on which it only stands.
var Scorer = {
  // [name of the page, title, anchor, description, score, file, kind]
  score: ([page, , , , score]) => {
    if (/^(getting-started|concepts|halo|cookbook)$/.test(page)) return 2 * score;
    const stands = /^(errors|examples|releases|testing|making|protocols|architecture|results)/;
    return stands.test(page) ? score / 4 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 12,
  term: 5,
  partialTerm: 2,
};
