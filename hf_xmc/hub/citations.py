"""Papers of the methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """
    The publication to cite for a method.

    Args:
        name (`str`): Name of the method as its authors write it.
        key (`str`): Key of the BibTeX entry.
        title (`str`): Title.
        author (`str`): Authors.
        venue (`str`): Proceedings or journal.
        year (`int`): Year.
        journal (`bool`, *optional*, defaults to `False`): Whether `venue` is a journal.
    """

    name: str
    key: str
    title: str
    author: str
    venue: str
    year: int
    journal: bool = False

    @property
    def bibtex(self) -> str:
        """The BibTeX entry."""
        kind, venue = ("article", "journal") if self.journal else ("inproceedings", "booktitle")
        fields = {"title": self.title, "author": self.author, venue: self.venue, "year": self.year}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@{kind}{{{self.key},", *lines, "}"])


PAPERS = {
    "xr-transformer": Paper(
        "XR-Transformer",
        "zhang2021fast",
        "Fast Multi-Resolution Transformer Fine-tuning for Extreme Multi-label Text Classification",
        "Zhang, Jiong and Chang, Wei-Cheng and Yu, Hsiang-Fu and Dhillon, Inderjit S.",
        "Advances in Neural Information Processing Systems",
        2021,
    ),
    "x-transformer": Paper(
        "X-Transformer",
        "chang2020taming",
        "Taming Pretrained Transformers for Extreme Multi-label Text Classification",
        "Chang, Wei-Cheng and Yu, Hsiang-Fu and Zhong, Kai and Yang, Yiming and Dhillon, Inderjit S.",
        "Proceedings of the 26th ACM SIGKDD International Conference on Knowledge Discovery and Data Mining",
        2020,
    ),
    "lightxml": Paper(
        "LightXML",
        "jiang2021lightxml",
        "LightXML: Transformer with Dynamic Negative Sampling for High-Performance Extreme Multi-label Text "
        "Classification",
        "Jiang, Ting and Wang, Deqing and Sun, Leilei and Yang, Huayi and Zhao, Zhengyang and Zhuang, Fuzhen",
        "Proceedings of the AAAI Conference on Artificial Intelligence",
        2021,
    ),
    "aplc-xlnet": Paper(
        "APLC-XLNet",
        "ye2020pretrained",
        "Pretrained Generalized Autoregressive Model with Adaptive Probabilistic Label Clusters for Extreme "
        "Multi-label Text Classification",
        "Ye, Hui and Chen, Zhiyu and Wang, Da-Han and Davison, Brian D.",
        "Proceedings of the 37th International Conference on Machine Learning",
        2020,
    ),
    "xr-linear": Paper(
        "XR-Linear",
        "yu2022pecos",
        "PECOS: Prediction for Enormous and Correlated Output Spaces",
        "Yu, Hsiang-Fu and Zhong, Kai and Zhang, Jiong and Chang, Wei-Cheng and Dhillon, Inderjit S.",
        "Journal of Machine Learning Research",
        2022,
        journal=True,
    ),
    "parabel": Paper(
        "Parabel",
        "prabhu2018parabel",
        "Parabel: Partitioned Label Trees for Extreme Classification with Application to Dynamic Search Advertising",
        "Prabhu, Yashoteja and Kag, Anil and Harsola, Shrutendra and Agrawal, Rahul and Varma, Manik",
        "Proceedings of the 2018 World Wide Web Conference",
        2018,
    ),
    "bonsai": Paper(
        "Bonsai",
        "khandagale2020bonsai",
        "Bonsai: Diverse and Shallow Trees for Extreme Multi-label Classification",
        "Khandagale, Sujay and Xiao, Han and Babbar, Rohit",
        "Machine Learning",
        2020,
        journal=True,
    ),
    "knn": Paper(
        "k nearest neighbours",
        "cover1967nearest",
        "Nearest neighbor pattern classification",
        "Cover, Thomas M. and Hart, Peter E.",
        "IEEE Transactions on Information Theory",
        1967,
        journal=True,
    ),
    "dismec": Paper(
        "DiSMEC",
        "babbar2017dismec",
        "DiSMEC: Distributed Sparse Machines for Extreme Multi-label Classification",
        'Babbar, Rohit and Sch{\\"o}lkopf, Bernhard',
        "Proceedings of the Tenth ACM International Conference on Web Search and Data Mining",
        2017,
    ),
}


def paper_of(method: str | None) -> Paper | None:
    """Returns the paper of a method or of a variant such as `xr-transformer-ensemble`; `None` if it has no paper."""
    matching = [name for name in PAPERS if method == name or (method or "").startswith(f"{name}-")]
    return PAPERS[max(matching, key=len)] if matching else None
