window.MathJax = { tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] }, options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" } };
