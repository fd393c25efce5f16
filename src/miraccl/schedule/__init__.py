"""The collective as data: records (``ir``), meaning (``interpret``), proof (``verify``), algorithms (``catalog``, ``algos``), text form
(``text``), changes (``passes``) and costs (``cost``)."""
